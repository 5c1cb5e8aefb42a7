"""Publications: a table as other engines read it, by metadata of theirs over the same objects (docs/publish.md).

`steps` decides what to publish and in which order, `files` which objects have the rows, `folder` is where it all is,
and `iceberg` and `delta` write the metadata, each by the library that its users know.
"""

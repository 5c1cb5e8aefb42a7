"""Classes of storage on S3 are the bucket's: what another class can read is read, and an archive is said to be one."""

from __future__ import annotations

import pytest

import persist_lib as persist
from persist_lib.errors import InvalidUsage
from persist_lib.location.objects.target import parse_url
from persist_lib.location.s3.objects import Clients
from tests import servers
from tests.shards import filled

CONFIG = persist.Config(inline_bytes=0)


def moved(url: str, class_: str) -> None:
    """What a lifecycle rule does: the same objects, by the same names, in another class."""
    target = parse_url(url)
    s3 = Clients(target).get()
    for found in s3.list_objects_v2(Bucket=target.bucket)["Contents"]:
        if found["Key"].endswith(".parquet"):
            source = {"Bucket": target.bucket, "Key": found["Key"]}
            s3.copy_object(Bucket=target.bucket, Key=found["Key"], CopySource=source, StorageClass=class_)


@pytest.mark.parametrize("class_", ["STANDARD_IA", "INTELLIGENT_TIERING", "GLACIER_IR"])
def test_objects_that_the_bucket_moved_are_read_compacted_and_collected(class_: str) -> None:
    servers.use_test_credentials()
    url = servers.s3_url()
    with persist.open(url, "memory:", config=CONFIG) as client:
        model = filled(client, 12)
        moved(url, class_)
        with client.open_reader("s") as read:
            assert len(read.snapshot(11, diff=True).to_arrow()) == len(model.contents(11))
        assert client.maintain("s").compacted.applied
        assert not client.verify("s").findings


@pytest.mark.parametrize("class_", ["GLACIER", "DEEP_ARCHIVE"])
def test_an_archived_object_is_no_matter_of_credentials(class_: str) -> None:
    servers.use_test_credentials()
    url = servers.s3_url()
    with persist.open(url, "memory:", config=CONFIG) as client:
        filled(client, 3)
        moved(url, class_)
        with client.open_reader("s") as read, pytest.raises(InvalidUsage, match="in an archive class") as caught:
            read.snapshot(2, diff=True).to_arrow()
        assert "credentials" not in caught.value.message
        assert caught.value.fields["code"] == "InvalidObjectState"

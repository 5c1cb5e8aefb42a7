"""A project on Persist: orders come as files, polars and Spark make tables of them, and a page shows one."""

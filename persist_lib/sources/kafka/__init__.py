"""Topics of Kafka as a source. Reading them needs the extra `persist-lib[kafka]`."""

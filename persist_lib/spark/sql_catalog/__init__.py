"""Tables of Persist in Spark SQL: the catalog in Java (`PersistCatalog.java`), and what it asks of Python."""

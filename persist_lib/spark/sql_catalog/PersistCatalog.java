package io.persist.spark;

import com.fasterxml.jackson.core.JsonProcessingException;
import com.fasterxml.jackson.core.type.TypeReference;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.IOException;
import java.math.BigDecimal;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.EnumSet;
import java.util.HashMap;
import java.util.HexFormat;
import java.util.Iterator;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.OptionalInt;
import java.util.OptionalLong;
import java.util.Set;
import java.util.function.Supplier;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import java.util.stream.Stream;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.analysis.NoSuchTableException;
import org.apache.spark.sql.catalyst.analysis.TableAlreadyExistsException;
import org.apache.spark.sql.connector.catalog.Identifier;
import org.apache.spark.sql.connector.catalog.NamespaceChange;
import org.apache.spark.sql.connector.catalog.StagedTable;
import org.apache.spark.sql.connector.catalog.StagingTableCatalog;
import org.apache.spark.sql.connector.catalog.SupportsDeleteV2;
import org.apache.spark.sql.connector.catalog.SupportsNamespaces;
import org.apache.spark.sql.connector.catalog.SupportsRead;
import org.apache.spark.sql.connector.catalog.SupportsRowLevelOperations;
import org.apache.spark.sql.connector.catalog.SupportsWrite;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableCapability;
import org.apache.spark.sql.connector.catalog.TableCatalogCapability;
import org.apache.spark.sql.connector.catalog.TableChange;
import org.apache.spark.sql.connector.catalog.TableInfo;
import org.apache.spark.sql.connector.catalog.constraints.Constraint;
import org.apache.spark.sql.connector.catalog.constraints.PrimaryKey;
import org.apache.spark.sql.connector.expressions.Expression;
import org.apache.spark.sql.connector.expressions.GeneralScalarExpression;
import org.apache.spark.sql.connector.expressions.Literal;
import org.apache.spark.sql.connector.expressions.NamedReference;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.connector.expressions.filter.Predicate;
import org.apache.spark.sql.connector.metric.CustomMetric;
import org.apache.spark.sql.connector.metric.CustomTaskMetric;
import org.apache.spark.sql.connector.read.Batch;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.connector.read.Statistics;
import org.apache.spark.sql.connector.read.SupportsPushDownLimit;
import org.apache.spark.sql.connector.read.SupportsPushDownRequiredColumns;
import org.apache.spark.sql.connector.read.SupportsPushDownV2Filters;
import org.apache.spark.sql.connector.read.SupportsReportStatistics;
import org.apache.spark.sql.connector.read.streaming.MicroBatchStream;
import org.apache.spark.sql.connector.write.BatchWrite;
import org.apache.spark.sql.connector.write.DataWriter;
import org.apache.spark.sql.connector.write.DataWriterFactory;
import org.apache.spark.sql.connector.write.LogicalWriteInfo;
import org.apache.spark.sql.connector.write.PhysicalWriteInfo;
import org.apache.spark.sql.connector.write.RowLevelOperation;
import org.apache.spark.sql.connector.write.RowLevelOperationBuilder;
import org.apache.spark.sql.connector.write.RowLevelOperationInfo;
import org.apache.spark.sql.connector.write.SupportsTruncate;
import org.apache.spark.sql.connector.write.Write;
import org.apache.spark.sql.connector.write.WriteBuilder;
import org.apache.spark.sql.connector.write.WriterCommitMessage;
import org.apache.spark.sql.connector.write.streaming.StreamingWrite;
import org.apache.spark.sql.execution.datasources.v2.python.PythonDataSourceV2;
import org.apache.spark.sql.types.Decimal;
import org.apache.spark.sql.types.Metadata;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/**
 * Tables of Persist in Spark SQL. All that it knows it asks of the Python data source `persist`: a source that gets the
 * option `catalog` has one column, whose type and metadata are the answer (answers.py).
 *
 * Each scan has a Python source of its own. Spark keeps in it what was planned with the filters of one query, so that
 * two scans that shared one would read each other's rows.
 */
public final class PersistCatalog implements StagingTableCatalog, SupportsNamespaces {
    private static final String SOURCE = "persist";
    private static final ObjectMapper JSON = new ObjectMapper();
    private static final Pattern SAID = Pattern.compile("persist_lib\\.errors\\.\\w+: ([^\\n]+)(?![\\s\\S]*persist_lib\\.errors)");

    /** Options of the source that SQL has words for, or that this class says. */
    private static final Set<String> OWN = Set.of("table", "path", "location", "consensus", "as_of", "newest", "columns",
        "diff", "changes", "pushed", "limit", "empty", "base", "catalog");

    private String name;
    private Map<String, String> options;

    @Override
    public void initialize(String name, CaseInsensitiveStringMap options) {
        if (name.equalsIgnoreCase(SOURCE)) {
            throw new IllegalArgumentException("A catalog cannot be called persist, as the data source is: Spark would"
                + " take persist.orders for a path of the source. Name it otherwise, as in spark.sql.catalog.lake");
        }
        this.name = name;
        this.options = new HashMap<>(options.asCaseSensitiveMap());
    }

    @Override
    public String name() {
        return name;
    }

    @Override
    public Set<TableCatalogCapability> capabilities() {
        return EnumSet.of(TableCatalogCapability.SUPPORT_TABLE_CONSTRAINT);
    }

    @Override
    public boolean useNullableQuerySchema() {
        return false;  // a column that is never null in a query stays so, and may be in the key
    }

    // --- tables -----------------------------------------------------------------------------------------------------

    @Override
    public Identifier[] listTables(String[] namespace) {
        return names("tables", namespace).map(one -> Identifier.of(namespace, one)).toArray(Identifier[]::new);
    }

    @Override
    public Table loadTable(Identifier ident) throws NoSuchTableException {
        return load(ident, Map.of());
    }

    @Override
    public Table loadTable(Identifier ident, String version) throws NoSuchTableException {
        return load(ident, Map.of("as_of", version));
    }

    @Override
    public Table loadTable(Identifier ident, long micros) throws NoSuchTableException {
        return load(ident, Map.of("micros", Long.toString(micros)));
    }

    private Table load(Identifier ident, Map<String, String> when) throws NoSuchTableException {
        Map<String, String> given = new HashMap<>(when);
        given.put("table", path(ident));
        StructField answer = ask("load", given);
        if (is(answer, "NotFound")) {
            throw new NoSuchTableException(ident);
        }
        return new PersistTable(ident, checked(answer));
    }

    @Override
    public Table createTable(Identifier ident, TableInfo info) throws TableAlreadyExistsException {
        StructField answer = ask("create", declared(ident, info));
        if (is(answer, "NameTaken")) {
            throw new TableAlreadyExistsException(ident);
        }
        return new PersistTable(ident, checked(answer));
    }

    private static Map<String, String> declared(Identifier ident, TableInfo info) {
        if (info.partitions().length > 0) {
            throw new UnsupportedOperationException("Tables of Persist have no partitions: leave out PARTITIONED BY."
                + " Rows are in the order of the key, and reads by it are short");
        }
        Map<String, String> given = new HashMap<>();
        for (Constraint one : info.constraints()) {
            if (!(one instanceof PrimaryKey)) {
                throw new UnsupportedOperationException("Of constraints Persist has PRIMARY KEY alone, and not "
                    + one.toDDL());
            }
            NamedReference[] columns = ((PrimaryKey) one).columns();
            given.put("primary", json(Arrays.stream(columns).map(c -> String.join(".", c.fieldNames())).toList()));
        }
        given.put("table", path(ident));
        given.put("schema", info.schema().json());
        given.put("properties", json(info.properties()));
        return given;
    }

    // A table that is made of a query is made by the write, which knows its options. One that is to be replaced is kept,
    // with its key and its history: its contents are.

    @Override
    public StagedTable stageCreate(Identifier ident, TableInfo info) throws TableAlreadyExistsException {
        Map<String, String> given = declared(ident, info);
        StructField answer = ask("stage", given);
        if (is(answer, "NameTaken")) {
            throw new TableAlreadyExistsException(ident);
        }
        return new Staged(ident, checked(answer), given);
    }

    @Override
    public StagedTable stageReplace(Identifier ident, TableInfo info) throws NoSuchTableException {
        Map<String, String> given = declared(ident, info);
        StructField answer = ask("replace", given);
        if (is(answer, "NotFound")) {
            throw new NoSuchTableException(ident);
        }
        return new Staged(ident, checked(answer), given);
    }

    @Override
    public StagedTable stageCreateOrReplace(Identifier ident, TableInfo info) {
        Map<String, String> given = declared(ident, info);
        StructField answer = ask("replace", given);
        return new Staged(ident, checked(is(answer, "NotFound") ? ask("stage", given) : answer), given);
    }

    @Override
    public Table alterTable(Identifier ident, TableChange... changes) throws NoSuchTableException {
        StructType added = new StructType(), widened = new StructType();
        Map<String, String> set = new HashMap<>(), renamed = new HashMap<>();
        List<String> dropped = new ArrayList<>(), relaxed = new ArrayList<>();
        List<List<String>> reordered = new ArrayList<>();
        for (TableChange change : changes) {
            String column = change instanceof TableChange.ColumnChange one && one.fieldNames().length == 1
                ? one.fieldNames()[0] : null;
            if (change instanceof TableChange.RenameColumn rename && column != null) {
                renamed.put(column, rename.newName());
            } else if (change instanceof TableChange.UpdateColumnType update && column != null) {
                widened = widened.add(column, update.newDataType(), true);
            } else if (change instanceof TableChange.DeleteColumn && column != null) {
                dropped.add(column);
            } else if (change instanceof TableChange.UpdateColumnNullability update && update.nullable()
                    && column != null) {
                relaxed.add(column);
            } else if (change instanceof TableChange.UpdateColumnPosition update && column != null) {
                reordered.add(List.of(column, behind(update.position())));
            } else if (change instanceof TableChange.AddColumn add && column != null && add.isNullable()
                    && add.defaultValue() == null) {
                added = added.add(column, add.dataType(), true);
                if (add.position() != null) {
                    reordered.add(List.of(column, behind(add.position())));
                }
            } else if (change instanceof TableChange.SetProperty property) {
                set.put(property.property(), property.value());
            } else {
                throw new UnsupportedOperationException("ALTER TABLE of a table of Persist adds columns that"
                    + " may be null and have no default, renames, widens, reorders and drops columns, drops NOT NULL,"
                    + " and sets"
                    + " the property retention, but not "
                    + change.getClass().getSimpleName() + ": use evolve of the table in Python");
            }
        }
        checked(ask("alter", Map.of("table", path(ident), "schema", added.json(), "widened", widened.json(),
            "changes", json(Map.of("rename", renamed, "drop", dropped, "relax", relaxed, "reorder", reordered)),
            "properties", json(set))));
        return loadTable(ident);
    }

    /** The column behind which another one comes; empty for the first place. */
    private static String behind(TableChange.ColumnPosition position) {
        return position instanceof TableChange.After after ? after.column() : "";
    }

    @Override
    public boolean dropTable(Identifier ident) {
        StructField answer = ask("drop", Map.of("table", path(ident)));
        if (is(answer, "NotFound")) {
            return false;
        }
        checked(answer);
        return true;
    }

    @Override
    public void renameTable(Identifier from, Identifier to) throws NoSuchTableException, TableAlreadyExistsException {
        // Spark leaves the catalog's own name in front of the new one.
        boolean isNamed = to.namespace().length > 0 && to.namespace()[0].equals(name);
        String[] namespace = isNamed ? Arrays.copyOfRange(to.namespace(), 1, to.namespace().length) : to.namespace();
        String target = path(Identifier.of(namespace, to.name()));
        StructField answer = ask("rename", Map.of("table", path(from), "to", target));
        if (is(answer, "NotFound")) {
            throw new NoSuchTableException(from);
        }
        if (is(answer, "NameTaken")) {
            throw new TableAlreadyExistsException(to);
        }
        checked(answer);
    }

    // --- namespaces: what names have before a `/`. They come and go with tables ---------------------------------------

    @Override
    public String[][] listNamespaces() {
        return listNamespaces(new String[0]);
    }

    @Override
    public String[][] listNamespaces(String[] namespace) {
        return names("namespaces", namespace).map(one -> one.split("/")).toArray(String[][]::new);
    }

    @Override
    public boolean namespaceExists(String[] namespace) {
        return true;
    }

    @Override
    public Map<String, String> loadNamespaceMetadata(String[] namespace) {
        return Map.of();
    }

    @Override
    public void createNamespace(String[] namespace, Map<String, String> metadata) {
        // It is there with its first table.
    }

    @Override
    public void alterNamespace(String[] namespace, NamespaceChange... changes) {
        throw new UnsupportedOperationException("A namespace of Persist is the first part of names, and has nothing"
            + " that could be set");
    }

    @Override
    public boolean dropNamespace(String[] namespace, boolean cascade) {
        throw new UnsupportedOperationException("A namespace of Persist is the first part of names: it is gone with the"
            + " last of its tables. DROP TABLE these");
    }

    // --- asking -------------------------------------------------------------------------------------------------------

    private static PythonDataSourceV2 source() {
        PythonDataSourceV2 source = new PythonDataSourceV2();
        source.setShortName(SOURCE);
        return source;
    }

    /** The Python source as a table of Spark's, with these columns. It is for one use. */
    private static Table python(StructType schema) {
        return source().getTable(schema, new Transform[0], Map.of());
    }

    private StructField ask(String verb, Map<String, String> more) {
        Map<String, String> given = new HashMap<>(options);
        given.putAll(more);
        given.put("catalog", verb);
        StructField answer = source().inferSchema(new CaseInsensitiveStringMap(given)).fields()[0];
        return is(answer, "NotFound") || is(answer, "NameTaken") ? answer : checked(answer);
    }

    private Stream<String> names(String verb, String[] namespace) {
        return ask(verb, Map.of("namespace", path(namespace))).metadata().getString("names").lines();
    }

    private static boolean is(StructField answer, String error) {
        return answer.metadata().contains("error") && answer.metadata().getString("error").equals(error);
    }

    private static StructField checked(StructField answer) {
        if (answer.metadata().contains("error")) {
            throw new IllegalArgumentException(answer.metadata().getString("message"));
        }
        return answer;
    }

    private static String path(String[] namespace) {
        return String.join("/", namespace);
    }

    private static String path(Identifier ident) {
        return ident.namespace().length == 0 ? ident.name() : path(ident.namespace()) + "/" + ident.name();
    }

    private static String json(Object value) {
        try {
            return JSON.writeValueAsString(value);
        } catch (JsonProcessingException error) {
            throw new IllegalStateException(error);
        }
    }

    /** A predicate as nested lists: [name, child, …], a column as {"column": …}, a value as {"value": …, "type": …}. */
    private static Object plain(Expression expression) {
        if (expression instanceof NamedReference reference && reference.fieldNames().length == 1) {
            return Map.of("column", reference.fieldNames()[0]);
        }
        if (expression instanceof Literal<?> literal) {
            Map<String, Object> found = new HashMap<>();
            found.put("type", literal.dataType().simpleString());
            found.put("value", text(literal.value()));
            return found;
        }
        if (expression instanceof GeneralScalarExpression general) {
            List<Object> found = new ArrayList<>(List.of(general.name()));
            for (Expression child : general.children()) {
                found.add(plain(child));
            }
            return found;
        }
        return List.of("?");
    }

    /** A value of Spark's inner form as text that loses nothing; null stays null. */
    private static String text(Object value) {
        if (value instanceof byte[] bytes) {
            return HexFormat.of().formatHex(bytes);
        }
        if (value instanceof Float number) {
            return Double.toString(number.doubleValue());
        }
        if (value instanceof Decimal number) {
            BigDecimal exact = number.toJavaBigDecimal();
            return exact.toPlainString();
        }
        return value == null ? null : value.toString();
    }

    private static String predicates(Predicate[] predicates) {
        return json(Arrays.stream(predicates).map(PersistCatalog::plain).toList());
    }

    // --- a table ------------------------------------------------------------------------------------------------------

    /** A table as of one time, which was decided when it was loaded. */
    private class PersistTable
            implements SupportsRead, SupportsWrite, SupportsDeleteV2, SupportsRowLevelOperations {
        private final Identifier ident;
        private final StructType schema;
        private final Metadata about;

        PersistTable(Identifier ident, StructField answer) {
            this.ident = ident;
            this.schema = (StructType) answer.dataType();
            this.about = answer.metadata();
        }

        @Override
        public String name() {
            return name + "." + path(ident).replace('/', '.');
        }

        @Override
        public String id() {
            return about.getString("id");
        }

        @Override
        public StructType schema() {
            return schema;
        }

        @Override
        public Set<TableCapability> capabilities() {
            Set<TableCapability> found = EnumSet.of(TableCapability.BATCH_READ, TableCapability.MICRO_BATCH_READ);
            if (about.getBoolean("writable")) {
                found.addAll(EnumSet.of(
                    TableCapability.BATCH_WRITE, TableCapability.TRUNCATE, TableCapability.STREAMING_WRITE));
            }
            return found;
        }

        @Override
        public Map<String, String> properties() {
            return texts("properties");
        }

        private Map<String, String> texts(String name) {
            try {
                return JSON.readValue(about.getString(name), new TypeReference<Map<String, String>>() {});
            } catch (JsonProcessingException error) {
                throw new IllegalStateException(error);
            }
        }

        /** The options of the catalog, then those of this use, then those of the table. */
        private CaseInsensitiveStringMap given(CaseInsensitiveStringMap more, String use, String... last) {
            for (String one : more.keySet()) {
                if (OWN.contains(one.toLowerCase(Locale.ROOT))) {
                    throw new IllegalArgumentException("A table of a catalog does not take the option " + one
                        + ": say it in SQL, by the name of the table (as in lake.orders.changes or .contents), by"
                        + " VERSION AS OF, and by the columns that are selected");
                }
            }
            Map<String, String> found = new HashMap<>(options);
            found.putAll(more.asCaseSensitiveMap());
            found.putAll(texts(use));
            for (int at = 0; at < last.length; at += 2) {
                found.put(last[at], last[at + 1]);
            }
            return new CaseInsensitiveStringMap(found);
        }

        @Override
        public ScanBuilder newScanBuilder(CaseInsensitiveStringMap more) {
            return new Builder(more);
        }

        @Override
        public WriteBuilder newWriteBuilder(LogicalWriteInfo info) {
            return write(info);
        }

        Writing write(LogicalWriteInfo info, String... last) {
            checkWritable();
            CaseInsensitiveStringMap all = given(info.options(), "write", last);
            return new Writing((SupportsWrite) python(info.schema()), new LogicalWriteInfo() {
                @Override
                public CaseInsensitiveStringMap options() {
                    return all;
                }

                @Override
                public String queryId() {
                    return info.queryId();
                }

                @Override
                public StructType schema() {
                    return info.schema();
                }
            });
        }

        private void checkWritable() {
            if (!about.getBoolean("writable")) {
                throw new UnsupportedOperationException(name() + " can be read alone: it is " + about.getString("what"));
            }
        }

        @Override
        public boolean canDeleteWhere(Predicate[] predicates) {
            checkWritable();
            Map<String, String> given = Map.of("table", path(ident), "pushed", predicates(predicates));
            return ask("deletes", given).metadata().getBoolean("exact");
        }

        @Override
        public void deleteWhere(Predicate[] predicates) {
            checkWritable();
            checked(ask("delete", Map.of("table", path(ident), "pushed", predicates(predicates))));
        }

        @Override
        public boolean truncateTable() {
            deleteWhere(new Predicate[0]);
            return true;
        }

        /** All rows are read, and what they become is the new contents, if nothing was written in between. */
        @Override
        public RowLevelOperationBuilder newRowLevelOperationBuilder(RowLevelOperationInfo info) {
            checkWritable();
            return () -> new RowLevelOperation() {
                @Override
                public Command command() {
                    return info.command();
                }

                @Override
                public ScanBuilder newScanBuilder(CaseInsensitiveStringMap more) {
                    return () -> new PersistScan(schema, new Predicate[0], OptionalInt.empty(), more);
                }

                @Override
                public WriteBuilder newWriteBuilder(LogicalWriteInfo write) {
                    return write(write, "base", about.getString("as_of")).truncate();
                }
            };
        }

        private final class Builder
                implements SupportsPushDownV2Filters, SupportsPushDownRequiredColumns, SupportsPushDownLimit {
            private final CaseInsensitiveStringMap more;
            private Predicate[] pushed = new Predicate[0];
            private OptionalInt limit = OptionalInt.empty();
            private StructType read = schema;

            Builder(CaseInsensitiveStringMap more) {
                this.more = more;
            }

            /** All of them are used as far as can be, and Spark applies all of them once more. */
            @Override
            public Predicate[] pushPredicates(Predicate[] predicates) {
                pushed = predicates;
                return predicates;
            }

            @Override
            public Predicate[] pushedPredicates() {
                return pushed;
            }

            /** Whole columns, also of nested ones. A count needs none, and reads the one that is the cheapest. */
            @Override
            public void pruneColumns(StructType required) {
                Set<String> names = Set.of(required.fieldNames());
                StructField[] found =
                    Arrays.stream(schema.fields()).filter(one -> names.contains(one.name())).toArray(StructField[]::new);
                read = new StructType(found.length > 0 ? found : new StructField[] {schema.apply(about.getString("cheap"))});
            }

            /** Of each partition; Spark takes so many of them once more, and asks only where it filters nothing. */
            @Override
            public boolean pushLimit(int most) {
                limit = OptionalInt.of(most);
                return true;
            }

            @Override
            public Scan build() {
                return new PersistScan(read, pushed, limit, more);
            }
        }

        private final class PersistScan implements Scan, SupportsReportStatistics {
            private final StructType read;
            private final Predicate[] pushed;
            private final OptionalInt limit;
            private final CaseInsensitiveStringMap more;
            private Batch batch;

            PersistScan(StructType read, Predicate[] pushed, OptionalInt limit, CaseInsensitiveStringMap more) {
                this.read = read;
                this.pushed = pushed;
                this.limit = limit;
                this.more = more;
            }

            private Scan python(String use, String... last) {
                SupportsRead table = (SupportsRead) PersistCatalog.python(read);
                return table.newScanBuilder(given(more, use, last)).build();
            }

            @Override
            public StructType readSchema() {
                return read;
            }

            @Override
            public String description() {
                return PersistTable.this.name() + " as of " + about.getString("as_of") + ", pushed "
                    + Arrays.toString(pushed) + (limit.isPresent() ? ", limit " + limit.getAsInt() : "");
            }

            /** Spark asks once for each copy that it makes of a plan: all get the same, which Python plans once. */
            @Override
            public synchronized Batch toBatch() {
                if (batch == null) {
                    List<String> last = new ArrayList<>();
                    if (pushed.length > 0) {
                        last.addAll(List.of("pushed", predicates(pushed)));
                    }
                    if (limit.isPresent()) {
                        last.addAll(List.of("limit", Integer.toString(limit.getAsInt())));
                    }
                    Batch planned = python("read", last.toArray(String[]::new)).toBatch();
                    batch = new Batch() {
                        @Override
                        public InputPartition[] planInputPartitions() {
                            return clear(planned::planInputPartitions);
                        }

                        @Override
                        public PartitionReaderFactory createReaderFactory() {
                            return planned.createReaderFactory();
                        }
                    };
                }
                return batch;
            }

            @Override
            public MicroBatchStream toMicroBatchStream(String checkpoint) {
                return python("stream").toMicroBatchStream(checkpoint);
            }

            @Override
            public CustomMetric[] supportedCustomMetrics() {
                return python("read").supportedCustomMetrics();
            }

            @Override
            public Statistics estimateStatistics() {
                long rows = about.getLong("rows");
                double share = (double) (8 + read.defaultSize()) / (8 + schema.defaultSize());
                long bytes = Math.max(rows * (8 + read.defaultSize()), (long) (about.getLong("bytes") * share));
                return new Statistics() {
                    @Override
                    public OptionalLong sizeInBytes() {
                        return OptionalLong.of(Math.max(1, bytes));
                    }

                    @Override
                    public OptionalLong numRows() {
                        return OptionalLong.of(rows);
                    }
                };
            }
        }
    }
    /** A table that is made of a query, or whose contents are replaced by one; without a query, by nothing. */
    private final class Staged extends PersistTable implements StagedTable {
        private final Identifier ident;
        private final boolean isNew;
        private final Map<String, String> declared;
        private boolean isWritten;

        Staged(Identifier ident, StructField answer, Map<String, String> declared) {
            super(ident, answer);
            this.ident = ident;
            this.isNew = answer.metadata().getBoolean("new");
            this.declared = declared;
        }

        @Override
        public WriteBuilder newWriteBuilder(LogicalWriteInfo info) {
            isWritten = true;
            return write(info);
        }

        @Override
        public void commitStagedChanges() {
            if (!isWritten) {
                checked(isNew ? ask("create", declared) : ask("delete", Map.of("table", path(ident), "pushed", "[]")));
            }
        }

        @Override
        public CustomTaskMetric[] reportDriverMetrics() {
            return new CustomTaskMetric[0];
        }

        @Override
        public void abortStagedChanges() {
            if (isNew) {
                ask("discard", Map.of("table", path(ident)));
            }
        }
    }
    // --- writing ------------------------------------------------------------------------------------------------------

    /** Do a step in Python, and raise what Persist says of it without the traceback. */
    private static <T> T clear(Supplier<T> step) {
        try {
            return step.get();
        } catch (Exception error) {
            Matcher said = SAID.matcher(String.valueOf(error.getMessage()));
            throw PersistCatalog.<RuntimeException>unchecked(
                said.find() ? new IllegalArgumentException(said.group(1).strip(), error) : error);
        }
    }

    /** What Scala throws without saying so. */
    @SuppressWarnings("unchecked")
    private static <E extends Exception> E unchecked(Exception error) throws E {
        throw (E) error;
    }

    /** A write of the Python source. */
    private static final class Writing implements SupportsTruncate {
        private final SupportsWrite table;
        private final LogicalWriteInfo info;
        private boolean truncates;

        Writing(SupportsWrite table, LogicalWriteInfo info) {
            this.table = table;
            this.info = info;
        }

        @Override
        public Writing truncate() {
            truncates = true;
            return this;
        }

        @Override
        public Write build() {
            WriteBuilder builder = table.newWriteBuilder(info);
            Write write = (truncates ? ((SupportsTruncate) builder).truncate() : builder).build();
            return new Write() {
                @Override
                public BatchWrite toBatch() {
                    return new WholeWrite(write.toBatch());
                }

                @Override
                public StreamingWrite toStreaming() {
                    return write.toStreaming();
                }

                @Override
                public CustomMetric[] supportedCustomMetrics() {
                    return write.supportedCustomMetrics();
                }
            };
        }
    }

    private static final class WholeWrite implements BatchWrite {
        private final BatchWrite python;

        WholeWrite(BatchWrite python) {
            this.python = python;
        }

        @Override
        public DataWriterFactory createBatchWriterFactory(PhysicalWriteInfo info) {
            DataWriterFactory factory = clear(() -> python.createBatchWriterFactory(info));
            return (partition, task) -> new ChunkWriter(factory, partition, task);
        }

        @Override
        public boolean useCommitCoordinator() {
            return python.useCommitCoordinator();
        }

        @Override
        public void commit(WriterCommitMessage[] messages) {
            clear(() -> {
                python.commit(flat(messages));
                return null;
            });
        }

        @Override
        public void abort(WriterCommitMessage[] messages) {
            python.abort(flat(messages));
        }

        private static WriterCommitMessage[] flat(WriterCommitMessage[] messages) {
            return Arrays.stream(messages)
                .flatMap(one -> one instanceof Supplier<?> chunks ? ((List<?>) chunks.get()).stream() : Stream.ofNullable(one))
                .toArray(WriterCommitMessage[]::new);
        }
    }

    /**
     * What a task wrote, in its chunks. A jar that was added to a running session is loaded once more for its tasks, so
     * that the driver knows the answer of a task only by a type that is not of this jar.
     */
    private record Chunks(List<WriterCommitMessage> get)
            implements WriterCommitMessage, Supplier<List<WriterCommitMessage>> {}

    /**
     * Spark writes what replaces rows (MERGE, UPDATE) one by one, and its writer for Python takes all of a task at once:
     * its `write` does nothing, and says nothing. So such rows are gathered, and written in chunks.
     */
    private static final class ChunkWriter implements DataWriter<InternalRow> {
        private static final int MOST_ROWS = 1 << 14;

        private final DataWriterFactory factory;
        private final int partition;
        private final long task;
        private final List<InternalRow> rows = new ArrayList<>();
        private final List<WriterCommitMessage> messages = new ArrayList<>();

        ChunkWriter(DataWriterFactory factory, int partition, long task) {
            this.factory = factory;
            this.partition = partition;
            this.task = task;
        }

        @Override
        public void write(InternalRow row) throws IOException {
            rows.add(row.copy());
            if (rows.size() >= MOST_ROWS) {
                writeAll(rows.iterator());
                rows.clear();
            }
        }

        @Override
        public void writeAll(Iterator<InternalRow> all) throws IOException {
            try (DataWriter<InternalRow> writer = factory.createWriter(partition, task)) {
                writer.writeAll(all);
                messages.add(writer.commit());
            }
        }

        @Override
        public WriterCommitMessage commit() throws IOException {
            if (!rows.isEmpty()) {
                writeAll(rows.iterator());
            }
            return new Chunks(messages);
        }

        @Override
        public void abort() {
            // What was written is an orphan, as after a task that was killed.
        }

        @Override
        public void close() {
            rows.clear();
        }
    }
}

{# dbt-spark merges only into the formats that it knows by name. #}
{% macro dbt_spark_validate_get_file_format(raw_file_format) %}{{ return(raw_file_format) }}{% endmacro %}
{% macro dbt_spark_validate_get_incremental_strategy(raw_strategy, file_format) %}{{ return(raw_strategy) }}{% endmacro %}

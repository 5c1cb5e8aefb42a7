{{ config(materialized='incremental', incremental_strategy='merge', unique_key='id', tblproperties={'key': 'id', 'unique': 'true'}) }}
select id, state, cents from {{ source('raw', 'orders') }}
{% if is_incremental() %} where id > 1 {% endif %}

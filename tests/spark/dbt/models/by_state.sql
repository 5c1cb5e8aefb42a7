{{ config(materialized='table', tblproperties={'key': 'state'}) }}
select state, sum(cents) as cents from {{ source('raw', 'orders') }} group by state

"""What the tests ask a running `dagster dev` over GraphQL: the questions that its own pages ask."""

from __future__ import annotations

LOCATIONS = """query { workspaceOrError { ... on Workspace { locationEntries { name loadStatus
  locationOrLoadError { __typename ... on PythonError { message cause { message } }
    ... on RepositoryLocation { repositories { name
      assetNodes { assetKey { path } groupName } jobs { name isAssetJob }
      schedules { name } sensors { name } } } } } } } }"""

LAUNCH = """mutation ($params: ExecutionParams!) { launchRun(executionParams: $params) {
  __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message }
  ... on RunConfigValidationInvalid { errors { message } } } }"""
BACKFILL = """mutation ($params: LaunchBackfillParams!) { launchPartitionBackfill(backfillParams: $params) {
  __typename ... on LaunchBackfillSuccess { backfillId } ... on PythonError { message } } }"""
BACKFILL_STATUS = """query ($id: String!) { partitionBackfillOrError(backfillId: $id) {
  ... on PartitionBackfill { status error { message } } } }"""
TERMINATE = """mutation ($id: String!) { terminateRun(runId: $id, terminatePolicy: SAFE_TERMINATE) {
  __typename ... on TerminateRunFailure { message } ... on PythonError { message } } }"""

RUN_FIELDS = "runId jobName status startTime endTime updateTime parentRunId runConfig tags { key value }"
RUN = f"query ($id: ID!) {{ runOrError(runId: $id) {{ ... on Run {{ {RUN_FIELDS} }} }} }}"
RUNS = f"""query ($filter: RunsFilter) {{ runsOrError(filter: $filter) {{
  ... on Runs {{ results {{ {RUN_FIELDS} }} }} }} }}"""
EVENTS = """query ($id: ID!, $after: String) { logsForRun(runId: $id, afterCursor: $after, limit: 1000) {
  ... on EventConnection { cursor hasMore events {
    __typename ... on MessageEvent { message timestamp level eventType }
    ... on ErrorEvent { error { message className cause { message cause { message } } } } } } } }"""

ADD_PARTITION = """mutation ($key: String!, $name: String!, $repository: RepositorySelector!) {
  addDynamicPartition(partitionKey: $key, partitionsDefName: $name, repositorySelector: $repository) { __typename } }"""
PARTITION_STATUSES = """query ($key: AssetKeyInput!) { assetNodeOrError(assetKey: $key) { ... on AssetNode {
  partitionKeys assetPartitionStatuses { ... on DefaultPartitionStatuses {
    materializedPartitions failedPartitions unmaterializedPartitions materializingPartitions } } } } }"""
LATEST_CHECKS = """query ($key: AssetKeyInput!) { assetNodeOrError(assetKey: $key) { ... on AssetNode {
  assetChecksOrError { ... on AssetChecks { checks { name executionForLatestMaterialization {
    status partition evaluation { severity success description } } } } } } } }"""

SENSOR = """query ($selector: SensorSelector!) { sensorOrError(sensorSelector: $selector) { ... on Sensor {
  sensorState { id status typeSpecificData { ... on SensorData { lastCursor } }
    ticks(limit: 50) {
      tickId status timestamp endTimestamp skipReason runIds runKeys cursor error { message } } } } } }"""
START_SENSOR = """mutation ($selector: SensorSelector!) { startSensor(sensorSelector: $selector) { __typename } }"""
STOP_SENSOR = "mutation ($id: String!) { stopSensor(id: $id) { __typename } }"
SET_CURSOR = """mutation ($selector: SensorSelector!, $cursor: String) {
  setSensorCursor(sensorSelector: $selector, cursor: $cursor) { __typename } }"""

"""The models whose traces are carried out on the real code."""

from __future__ import annotations

from tests.models.replay import Replay
from tests.models.replay_groups import GroupsReplay
from tests.models.replay_shard import ShardReplay
from tests.models.replay_sources import SourcesReplay
from tests.models.replay_wal import WalReplay

REPLAYS: tuple[type[Replay], ...] = (ShardReplay, GroupsReplay, WalReplay, SourcesReplay)

"""Where the bytes are: `Blob` and `Consensus` (see `api`), what implements them, and what wraps them."""

from persist_lib.location.api import Blob, BlobEntry, Consensus, Row
from persist_lib.location.open import Location, open_location
from persist_lib.location.scheme import Opening, Scheme

__all__ = ["Blob", "BlobEntry", "Consensus", "Location", "Opening", "Row", "Scheme", "open_location"]

"""Mutations of the ledger's scripts: each takes away one fence, or the smallest set of fences that guard the same case.

For each the list says what it takes away and why that fence is there, and names the tests that must fail without it;
`tests/test_mutations.py` shows that they do. A fence that stands in no list is one that nobody would miss.
"""

from __future__ import annotations

from tests.mutations_of_batches import BATCHES, FILES, PRIORITIES
from tests.mutations_of_ends import DEATHS, ENDS
from tests.mutations_of_keys import KEYS
from tests.mutations_of_metrics import METRICS
from tests.mutations_of_queue import ADMISSION, SHARES
from tests.mutations_of_reaper import REAPER
from tests.mutations_of_rides import ACCEPT, CLAIM, STEP
from tests.mutations_of_versions import VERSIONS
from tests.mutations_of_webhooks import WEBHOOKS

MUTATIONS = (
    *ACCEPT,
    *CLAIM,
    *STEP,
    *ENDS,
    *DEATHS,
    *REAPER,
    *VERSIONS,
    *PRIORITIES,
    *FILES,
    *BATCHES,
    *WEBHOOKS,
    *KEYS,
    *ADMISSION,
    *SHARES,
    *METRICS,
)

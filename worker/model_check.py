"""Everything that can be known of a model without loading its weights: `python -m worker.model_check`.

A process of its own, since it needs torch: `carpool doctor` runs it with the settings in the environment. Its last line
is one JSON object, `{"detail": …}` or `{"error": …}`.
"""

from __future__ import annotations

import json
import sys

from tasks.settings import load_settings
from worker.engines.base import EngineError
from worker.model_manager import examine_model


def main() -> int:
    """Examine the model that the settings name. Returns 0, or 3 for one that cannot be served."""
    try:
        answer, code = {"detail": examine_model(load_settings())}, 0
    except EngineError as error:
        answer, code = {"error": str(error)}, 3
    sys.stdout.write(json.dumps(answer) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())

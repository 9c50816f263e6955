"""The suites that every implementation of attention passes, by the CUDA kernels on the CPU model.

The tests are those of tests/functional; here the ``attend`` fixture is the one of this folder.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "functional"))

from test_attention_cases import *  # noqa: F403
from test_attention_dropout import *  # noqa: F403
from test_attention_masked import *  # noqa: F403
from test_attention_numerics import *  # noqa: F403

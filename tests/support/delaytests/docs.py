"""The complete test files that docs/how-to/testing.md shows, run as such."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

__all__ = ["run_example"]

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "testing.md"


def run_example(pytester: Any, module: str) -> None:
    """Runs the one block that imports from ``module``; all of its tests must pass."""
    found = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    (code,) = [block for block in found if f"\nfrom {module} import" in block and "def test_" in block]
    pytester.makepyfile(code)
    options = ("-p", "no:cacheprovider", "-o", "asyncio_default_fixture_loop_scope=function")
    pytester.runpytest_inprocess(*options).assert_outcomes(passed=code.count("def test_"))

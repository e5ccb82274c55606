"""Fixtures of the browser tests: the system's chromium, one JupyterLab for all of them, a page per test."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.lab import CHROMIUM_FLAGS, Lab, find_chromium, lab_server
from tests.browser.workbench import RESET, workbench

ROOT = Path(__file__).resolve().parent.parent.parent
LEFT_OUT = shutil.ignore_patterns(".ipynb_checkpoints", "__pycache__")


def pytest_collection_modifyitems(items: list) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in Path(item.fspath).parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def chromium() -> str:
    found = find_chromium()
    if found is None and os.environ.get("SPECNB_REQUIRE_BROWSER") == "1":
        pytest.fail("SPECNB_REQUIRE_BROWSER=1, but there is no chromium on the path and SPECNB_CHROMIUM names none.")
    if found is None:
        pytest.skip("no chromium on the path; install it or set SPECNB_CHROMIUM to run the browser tests")
    return found


@pytest.fixture(scope="session")
def browser_type_launch_args(chromium: str) -> dict:
    """Playwright starts the system's browser instead of one that it would download."""
    return {"executable_path": chromium, "args": CHROMIUM_FLAGS, "headless": True}


@pytest.fixture(scope="session")
def browser_context_args() -> dict:
    return {"viewport": {"width": 1200, "height": 900}}


@pytest.fixture(scope="session")
def lab_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the server serves: a copy of the notebooks, and the small notebook of the widgets."""
    root = tmp_path_factory.mktemp("lab")
    if (ROOT / "notebooks").is_dir():
        shutil.copytree(ROOT / "notebooks", root / "notebooks", ignore=LEFT_OUT)
    workbench(root / "workbench.ipynb")
    workbench(root / "gone.ipynb")
    return root


@pytest.fixture(scope="session")
def lab_url(chromium: str, lab_root: Path) -> Iterator[str]:
    with lab_server(lab_root) as url:
        yield url


@pytest.fixture
def lab(page, lab_url: str) -> Iterator[Lab]:
    """A page of its own, for tests that open another notebook or end the kernel."""
    opened = Lab(page, lab_url)
    yield opened
    opened.shut_down()


@pytest.fixture(scope="session")
def opened_bench(browser, browser_context_args: dict, lab_url: str) -> Iterator[Lab]:
    """The notebook of the widgets, opened and run once: starting JupyterLab takes longer than all these tests."""
    context = browser.new_context(**browser_context_args)
    bench = Lab(context.new_page(), lab_url)
    bench.open("workbench.ipynb")
    bench.run_all()
    yield bench
    context.close()


@pytest.fixture
def bench(opened_bench: Lab) -> Lab:
    """The opened notebook with every widget as it was at the start."""
    opened_bench.run_code(RESET)
    # the kernel is done, but its message may still be on the way: a key pressed now would be undone by it
    expect(opened_bench.output(".specnb-replay [role=status]")).to_have_text(re.compile("^Round 1 of 2"))
    return opened_bench

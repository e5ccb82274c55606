"""What is installed: dependencies said twice agree, the library alone stays light, the wheel holds what it should."""

import hashlib
import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import specnb
from specnb.resources import data_path

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
CONDA_NAMES = {"torch": "pytorch"}
NOTEBOOK_PACKAGES = {
    "IPython", "anywidget", "ipykernel", "ipywidgets", "jupyter_client", "jupyterlab", "matplotlib", "nbclient",
    "nbformat", "notebook", "pandas", "seaborn", "traitlets",
}  # fmt: skip


def ranges(lines: list[str]) -> dict[str, str]:
    """Normalised name → version range."""
    parsed = [Requirement(line) for line in lines]
    return {req.name.lower().replace("_", "-"): str(req.specifier) for req in parsed}


# --- one truth ---


def test_environment_yml_is_in_step():
    listed = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    conda = ranges([line for line in listed if isinstance(line, str)])
    wanted = ranges([*PROJECT["dependencies"], *EXTRAS["lab"], *EXTRAS["test"]])
    assert conda.pop("python") == PROJECT["requires-python"]
    assert conda.pop("pip") == ""
    assert conda == {CONDA_NAMES.get(name, name): version for name, version in wanted.items()}


def test_environment_yml_ends_with_the_project_itself():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["channels"] == ["conda-forge", "nodefaults"]
    assert environment["dependencies"][-1] == {"pip": ["-e .[lab,test]"]}


def test_an_extra_named_twice_has_one_range():
    lab, test = ranges(EXTRAS["lab"]), ranges(EXTRAS["test"])
    assert {name: lab[name] for name in lab.keys() & test.keys()} == {n: test[n] for n in lab.keys() & test.keys()}


def test_pins_lie_inside_the_ranges():
    supported = {Requirement(line).name: Requirement(line).specifier for line in PROJECT["dependencies"]}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert [pin.name for pin in pins] == ["torch"]
    for pin in pins:
        (exact,) = pin.specifier
        assert exact.operator == "=="
        assert supported[pin.name].contains(exact.version)


def test_the_oldest_supported_transformers_is_the_one_tested():
    (oldest,) = re.findall(r"^OLDEST\s*:= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    supported = next(line for line in PROJECT["dependencies"] if line.startswith("transformers"))
    assert oldest.replace("==", ">=").removesuffix(".0") == supported


def test_versions_agree():
    assert specnb.__version__ == PROJECT["version"]


# --- the library alone ---


def modules_after(code: str) -> set[str]:
    """Names of all modules loaded by `code` in a fresh process."""
    script = f"{code}\nimport json, sys; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def added() -> set[str]:
    """Modules that `import specnb` adds to torch and transformers."""
    return modules_after("import torch, transformers, specnb") - modules_after("import torch, transformers")


def test_import_loads_no_notebook_packages(added):
    assert {name.partition(".")[0] for name in added} & NOTEBOOK_PACKAGES == set()


def test_import_is_light(added):
    """Model classes take seconds to import, and loading a model does it soon enough."""
    heavy = {"transformers.modeling_utils", "transformers.generation.utils", "accelerate", "gguf", "scipy.stats"}
    assert added & heavy == set()


def test_the_library_alone_needs_no_notebook_packages():
    needed = ranges(PROJECT["dependencies"]).keys()
    assert needed & ranges([*EXTRAS["lab"], *EXTRAS["test"]]).keys() == set()


# --- the wheel ---


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("specnb-*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_the_whole_package(wheel):
    files = [path for path in (ROOT / "specnb").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    here = {path.relative_to(ROOT).as_posix() for path in files}
    assert {"specnb/py.typed", "specnb/models.py"} < here
    assert any(name.startswith("specnb/static/") for name in here)
    data = [path for name in ("prompts", "drafts") for path in (ROOT / "data" / name).rglob("*") if path.is_file()]
    carried = {f"specnb/{path.relative_to(ROOT).as_posix()}" for path in data}
    assert len([name for name in carried if name.startswith("specnb/data/prompts/")]) == 9
    assert "specnb/data/drafts/smollm2-135m-draft/draft.safetensors" in carried
    assert here | carried == {name for name in wheel.namelist() if name.startswith("specnb/")}


def test_the_wheel_holds_nothing_else(wheel):
    assert {name.partition("/")[0] for name in wheel.namelist()} == {"specnb", f"specnb-{PROJECT['version']}.dist-info"}


def test_the_installed_package_finds_its_data(wheel, tmp_path):
    wheel.extractall(tmp_path)
    script = """if True:
        from specnb import resources
        from specnb.drafters import small_model
        print(resources.data_path('prompts'), small_model.small_model_folder('smollm2-135m-draft'))
    """
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    home = tmp_path / "specnb" / "data"
    assert done.stdout.split() == [str(home / "prompts"), str(home / "drafts" / "smollm2-135m-draft")], done.stderr


def test_a_checkout_finds_its_data():
    assert data_path("prompts") == ROOT / "data" / "prompts"
    with pytest.raises(ValueError, match=r"no data named 'weights'.* prompts"):
        data_path("weights")


def test_the_wheel_carries_the_licence(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith("licenses/LICENSE")]
    apache_2 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"  # apache.org/licenses/LICENSE-2.0.txt
    assert hashlib.sha256(wheel.read(name)).hexdigest() == apache_2


# --- what README promises ---

README = (ROOT / "README.md").read_text()


def test_links_in_the_readme_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)", README)
    local = [link for link in links if not link.startswith("http")]
    assert local
    assert [link for link in local if not (ROOT / link).exists()] == []


def test_every_notebook_is_on_the_map_in_order():
    there = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
    assert re.findall(r"\(notebooks/([^)]+\.ipynb)\)", README) == there


def test_make_targets_in_the_readme_exist():
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"make ([a-z][\w-]*)", README))
    assert {"lab", "test"} <= named <= targets


def run_blocks(*blocks: str) -> subprocess.CompletedProcess:
    """Run blocks of Python from the README, one after the other, in a fresh process."""
    return subprocess.run([sys.executable, "-c", "\n".join(blocks)], cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.real_model
def test_the_first_example_prints_what_the_readme_says(blocks):
    (printed,) = re.findall(r"```text\n(.*?)```", README, re.DOTALL)
    done = run_blocks(blocks[0])
    assert done.returncode == 0, done.stderr
    assert done.stdout == printed


@pytest.mark.real_model
def test_the_other_examples_run(blocks):
    """The Hub cannot be reached from every machine: the default model stands in for the one that is named."""
    named = '"Qwen/Qwen3-0.6B"'
    assert named in blocks[1]
    use = """
drafter = Again(tokenizer(".").input_ids[-1])
plain = specnb.generate(model, **inputs, max_new_tokens=8)
assert specnb.generate(model, **inputs, drafter=drafter, max_new_tokens=8).sequences.equal(plain.sequences)
assert drafter.propose([7, 8, drafter.full_stop, 5, 6, 7], 2) == [5, 6]
"""
    done = run_blocks("import specnb", blocks[1].replace(named, ""), *blocks[2:], use)
    assert done.returncode == 0, done.stderr

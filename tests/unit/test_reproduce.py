"""scripts/reproduce.py: its commands are ones the project has, and its stages end as they say."""

import re
from pathlib import Path

import pytest

from scripts import reproduce

ROOT = Path(reproduce.__file__).resolve().parents[1]
COMMANDS = {command.name: command for stage in reproduce.STAGES.values() for command in stage.commands}

_SHARED = re.compile(r"^import (_\w+)$", re.MULTILINE)  # one script's options that another adds


def _sources(words: list[str]) -> list[Path]:
    """The files that read the flags of a command."""
    if words[:2] == ["-m", "pytest"]:
        return [ROOT / word for word in words if word.endswith(".py")]
    if words[:2] == ["-m", "taco_kernels.benchmarks"]:
        return [ROOT / "taco_kernels/benchmarks" / f"{words[2].replace('-', '_')}.py"]
    if words[0] == "-m":
        return [ROOT / f"{words[1].replace('.', '/')}.py"]
    script = ROOT / words[0]
    return [script, *(ROOT / f"scripts/{name}.py" for name in _SHARED.findall(script.read_text()))]


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_exist_with_their_flags(name: str) -> None:
    words = COMMANDS[name].line.removeprefix(reproduce.TORCHRUN).split()
    sources = _sources(words)
    assert sources and all(path.is_file() for path in sources)
    flags = {word for word in words if word.startswith("--")}
    read = {word for path in sources for word in re.findall(r'"(--[a-z-]+)"', path.read_text())}
    assert flags <= read, f"{sources[0]} does not take {flags - read}"


def test_every_gpu_test_is_in_a_stage_and_every_name_once() -> None:
    named = {word for command in COMMANDS.values() for word in command.line.split() if word.endswith(".py")}
    assert len(COMMANDS) == sum(len(stage.commands) for stage in reproduce.STAGES.values()), (
        "logs overwritten"
    )
    assert {f"tests/gpu/{path.name}" for path in (ROOT / "tests/gpu").glob("test_*.py")} <= named


def _python(name: str, code: str, minutes: float = 1.0) -> reproduce.Command:
    return reproduce.Command(name, f'-c "{code}"', minutes)


@pytest.mark.parametrize("together", [False, True])
def test_a_stage_reports_how_its_commands_end(together: bool, tmp_path: Path, capsys) -> None:
    stage = reproduce.Stage(
        "test",
        1,
        (
            _python("fails", "import sys; print('seen'); sys.exit(3)"),
            _python("hangs", "import time; time.sleep(60)", minutes=0.02),
            _python("works", "open(r'{output}/made', 'w').write('{gpus}')"),
        ),
        together,
    )
    rows = reproduce.run_stage(stage, tmp_path, 3)
    assert [(name, ended) for name, _, ended in rows] == [
        ("fails", "exit status 3"),
        ("hangs", "killed after 0.02 min"),
        ("works", "ok"),
    ]
    assert rows[1][1] < 30 and (tmp_path / "made").read_text() == "3"
    assert (tmp_path / "fails.log").read_text() == "seen\n" and "seen" in capsys.readouterr().out


def test_without_enough_devices_it_says_so(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(reproduce._cli.UsageError, match="--gpus 2: this machine has 1 CUDA device"):
        reproduce.main(["--gpus", "2", "--output", str(tmp_path)])


def test_the_list_can_be_pasted(capsys) -> None:
    reproduce.main(["--list", "--only", "collectives"])
    assert "--nproc-per-node 4 -m taco_kernels.benchmarks collectives --json" in capsys.readouterr().out

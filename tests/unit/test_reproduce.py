"""scripts/reproduce.py: its commands are ones the project has, and end as they say."""

import argparse
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from scripts import _cli, _commands, reproduce

ROOT = Path(reproduce.__file__).resolve().parents[1]
COMMANDS = {command.name: command for command in reproduce.COMMANDS}


def _sources(words: list[str]) -> list[Path]:
    """The files that read the flags of a command."""
    if words[:2] == ["-m", "pytest"]:
        return [ROOT / words[-1] / "conftest.py"]
    if words[:2] == ["-m", "taco_kernels.benchmarks"]:
        names = ("__main__", words[2].replace("-", "_"))
        return [ROOT / f"taco_kernels/benchmarks/{name}.py" for name in names]
    if words[0] == "-m":
        path = ROOT / words[1].replace(".", "/")
        return [path / "__main__.py" if path.is_dir() else path.with_suffix(".py")]
    script = ROOT / words[0]
    return [script]


@pytest.fixture(scope="module")
def megatron_flags() -> set[str]:
    """Megatron's and ours."""
    from megatron.training.arguments import add_megatron_arguments

    from megatron.compression.setup import add_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False, conflict_handler="resolve")
    parser = add_arguments(add_megatron_arguments(parser))
    return {flag for action in parser._actions for flag in action.option_strings}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_exist_with_their_flags(name: str, megatron_flags: set[str]) -> None:
    launcher = re.escape(_commands.TORCHRUN).replace(re.escape("{gpus}"), r"\S+")
    words = shlex.split(re.sub(launcher, "", COMMANDS[name].line))
    sources = _sources(words)
    assert all(path.is_file() for path in sources), sources
    text = "".join(path.read_text() for path in sources)
    read = set(re.findall(r'"(--[a-z0-9-]+)"', text))
    if '"--{dimension}-parallel"' in text:
        read |= {f"--{name}-parallel" for name in ("tensor", "data", "pipeline")}
    if "parse_known_args" in text:
        read |= megatron_flags  # they hand on what is not theirs
    assert {word for word in words if word.startswith("--")} <= read


def test_every_name_once() -> None:
    assert len(COMMANDS) == len(reproduce.COMMANDS), "logs overwritten"


def filled(command: reproduce.Command) -> list[str]:
    return shlex.split(reproduce.filled(command, Path("results"), 2))


def test_settings_are_ones_that_there_are() -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    import bench_end_to_end

    from scripts._launch import parse_setting
    from scripts.accuracy.run import parse
    from scripts.accuracy.settings import setting_of

    for command in reproduce.COMMANDS:
        words = shlex.split(command.line)
        if "--shape" in words:
            bench_end_to_end.parse(filled(command)[1:])
        if words[:2] == ["-m", "scripts.accuracy.run"]:
            for name in parse(filled(command)[2:]).settings or ():
                assert setting_of(name).codecs
        if "--codecs" in words:
            for text in words[words.index("--codecs") + 1 :]:
                if text.startswith("--"):
                    break
                parse_setting(text)


def test_specs_are_those_of_the_package() -> None:
    """reproduce.py needs nothing installed, so it has copies."""
    from megatron.compression.auto.candidates import within
    from megatron.compression.data_parallel.presets import PRESETS

    assert PRESETS["sdp4bit"].weights == _commands.WEIGHTS
    (stages,) = (one.name for one in within(0.1, "pipeline_parallel") if not one.exact)
    assert stages.replace(", back ", ",,") + "-pp" == _commands.BETWEEN_STAGES


@pytest.mark.parametrize(
    ("name", "code", "ended"),
    [
        ("fails", "import sys; print('seen'); sys.exit(3)", "exit status 3"),
        ("hangs", "import time; time.sleep(60)", "killed after 0.02 min"),
        ("leaves", f"print('{_cli.runs_left(2, 3)}')", "2 of 3 runs are left"),
        ("works", "open(r'{output}/made', 'w').write('{gpus}')", "ok"),
    ],
)
def test_a_command_says_how_it_ended(name: str, code: str, ended: str, tmp_path: Path, capsys) -> None:
    minutes = 0.02 if name == "hangs" else 1
    command = reproduce.Command("stage", 1, minutes, name, f'-c "{code}"')
    seconds, found = reproduce.run(command, tmp_path, 3)
    assert found == ended and seconds < 45
    if name == "works":
        assert (tmp_path / "made").read_text() == "2", "heads do not divide by three"
    if name == "fails":
        assert (tmp_path / "fails.log").read_text() == "seen\n" and "seen" in capsys.readouterr().out


def test_a_killed_script_leaves_nothing_running(tmp_path: Path) -> None:
    command = "import os, time; open(r'{output}/pid', 'w').write(str(os.getpid())); time.sleep(60)"
    code = (
        "import sys; from pathlib import Path; from scripts import _cli, reproduce;"
        "command = reproduce.Command('stage', 1, 1, 'sleeps', sys.argv[1]);"
        "sys.exit(_cli.run(lambda _: reproduce.run(command, Path(sys.argv[2]), 1)))"
    )
    process = subprocess.Popen([sys.executable, "-c", code, f'-c "{command}"', str(tmp_path)], cwd=ROOT)
    pid, deadline = tmp_path / "pid", time.monotonic() + 60
    while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.terminate()
    assert process.wait(30) == 130
    assert not psutil.pid_exists(int(pid.read_text()))


def test_without_enough_devices_it_says_so(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(_cli.UsageError, match="--gpus 2: this machine has 1 CUDA device"):
        reproduce.main(["--gpus", "2", "--output", str(tmp_path)])


def test_the_list_can_be_pasted(capsys) -> None:
    reproduce.main(["--list", "--only", "collectives"])
    assert "--nproc-per-node 4 -m taco_kernels.benchmarks collectives --json" in capsys.readouterr().out
    reproduce.main(["--list", "--only", "end-to-end", "--gpus", "8"])
    assert "--tensor-parallel 4 --json" in capsys.readouterr().out, "heads divide by four"
    reproduce.main(["--list", "--only", "taco", "caat-net", "--gpus", "1"])
    printed = capsys.readouterr().out
    assert "--tensor-parallel 2 --output" in printed, "one GPU is shared by two ranks"
    assert "paper: TACO, GPT-350M over 20,000 iterations: validation loss 2.3899" in printed


def test_a_command_can_be_named_alone(capsys) -> None:
    reproduce.main(["--list", "--only", "tagc_times", "codecs"])
    heads = [line.partition(" (")[0] for line in capsys.readouterr().out.splitlines() if "(GPUs" in line]
    assert heads[:2] == ["codecs, codec", "codecs, sdp4bit"] and heads[-1] == "tagc, tagc_times"
    reproduce.main(["--list", "--only", "sdp4bit"])
    assert "taco_kernels.benchmarks" not in capsys.readouterr().out, "the stage of that name"


def test_a_papers_number_stands_below_ours(tmp_path: Path, capsys) -> None:
    command = reproduce.Command("stage", 1, 1, "ours", "-c \"print('ours: 2.0')\"", "theirs: 1.87")
    reproduce.run(command, tmp_path, 1)
    assert capsys.readouterr().out.endswith("ours: 2.0\npaper: theirs: 1.87\n")

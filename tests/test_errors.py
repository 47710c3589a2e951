"""What a command shows of a mistake: one sentence and exit code 2; a fault of ours keeps its trace."""

import errno

import pytest

from fp4repro.errors import Fp4ReproError, run_stage


def fails(error):
    def main():
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (Fp4ReproError("the width is odd"), "stage: error: the width is odd\n"),
        (
            OSError(errno.ENOSPC, "No space left on device", "out/x"),
            "stage: error: No space left on device: out/x\n",
        ),
        (FileExistsError(errno.EEXIST, "File exists", "out"), "stage: error: File exists: out\n"),
    ],
)
def test_one_sentence(capsys, error, sentence):
    with pytest.raises(SystemExit) as stop:
        run_stage("stage", fails(error))
    assert stop.value.code == 2 and capsys.readouterr().err == sentence


def test_our_own_faults_are_not_hidden():
    with pytest.raises(ZeroDivisionError):
        run_stage("stage", fails(ZeroDivisionError()))

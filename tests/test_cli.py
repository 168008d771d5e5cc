"""The command line: doctor tries a kernel, cache shows and empties the store."""

import pytest
import torch

from tensorplay.cli import main, perceptron


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TP_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_doctor(capsys, cache):
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "right; compiled by 1 compiler run" in said and str(cache) in said and torch.__version__ in said
    assert main(["doctor"]) == 0
    assert "found in the cache" in capsys.readouterr().out


def test_doctor_names_a_missing_compiler(capsys, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert main(["doctor"]) == 1
    assert "no-such-compiler" in capsys.readouterr().out


def test_cache(capsys, cache):
    main(["doctor"])
    capsys.readouterr()
    assert main(["cache"]) == 0
    assert "artifacts     1" in capsys.readouterr().out
    assert main(["cache", "clear"]) == 0
    assert "artifacts     0" in capsys.readouterr().out
    assert not list(cache.glob("*/*.so"))


def test_demo_without_transformers():
    name, model, call = perceptron()
    assert "transformers is not installed" in name and call(model).shape == (256, 512)


def test_unknown_command():
    with pytest.raises(SystemExit):
        main(["nothing"])

"""Rows 8.10, 11.01-11.03, 11.05, 11.06: the key, one compiler run for a key, damage, controls, errors."""

import ctypes
import dataclasses
import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from tensorplay import config, record
from tensorplay.errors import CompilerError, TensorPlayError
from tensorplay.stax.artifacts import digest, store, toolchain
from tensorplay.stax.artifacts.build import build
from tensorplay.stax.codegen.target import Source, Target

TEXT = """
extern "C" int segment_0(void *const *p, int threads) {
  const float *x = (const float *)p[0];
  float *out = (float *)p[1];
  if (x[0] < 0) return 1;
  for (int i = 0; i < 4; i++) out[i] = x[i] * FACTOR + threads;
  return 0;
}
"""


def source(factor: float = 2.0, flags: tuple[str, ...] = ()) -> Source:
    return Source("cpp", TEXT.replace("FACTOR", str(factor)), ("segment_0",), {}, (), flags)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TP_CACHE_DIR", str(tmp_path))
    return tmp_path


def call(artifact, x):
    out = torch.empty(4)
    pointers = (ctypes.c_void_p * 2)(x.data_ptr(), out.data_ptr())
    return artifact.entries["segment_0"](pointers, 3), out


def test_built_code_runs(cache):
    artifact = build(source(), Target())
    assert artifact.built
    code, out = call(artifact, torch.arange(4.0))
    assert code == 0
    assert out.tolist() == [3, 5, 7, 9]
    assert call(artifact, -torch.ones(4))[0] == 1


def test_one_compilation_a_key(cache):
    before = toolchain.RUNS
    with record.record() as events:
        first, second = build(source(), Target()), build(source(), Target())
    assert first is second
    assert toolchain.RUNS == before + 1
    assert [e.kind for e in events] == ["compile"]
    build(source(3.0), Target())
    assert toolchain.RUNS == before + 2


def test_nothing_to_build(cache):
    before = toolchain.RUNS
    artifact = build(Source("cpp", "", (), {}), Target())
    assert artifact.path is None and not artifact.built and toolchain.RUNS == before


def test_key_depends_on_everything(cache, monkeypatch):
    compiler = toolchain.find()
    key = digest.key(source(), Target(), compiler)
    assert key == digest.key(source(), Target(), compiler)
    others = {
        digest.key(source(2.5), Target(), compiler),
        digest.key(source(flags=("-O3",)), Target(), compiler),
        digest.key(source(), Target(isa="avx2"), compiler),
        digest.key(source(), Target(), dataclasses.replace(compiler, version="another")),
        digest.key(source(), Target(), dataclasses.replace(compiler, command=("/another",))),
    }
    monkeypatch.setattr(digest, "VERSION", "another")
    others.add(digest.key(source(), Target(), compiler))
    monkeypatch.undo()
    monkeypatch.setattr(digest, "header_text", lambda: "another")
    others.add(digest.key(source(), Target(), compiler))
    monkeypatch.undo()
    monkeypatch.setenv("TP_CACHE_TAG", "another")
    others.add(digest.key(source(), Target(), compiler))
    assert key not in others and len(others) == 8


def test_no_boundary_between_flags_is_lost(cache):
    compiler = toolchain.find()
    assert digest.key(source(flags=("-a", "b")), Target(), compiler) != digest.key(
        source(flags=("-ab",)), Target(), compiler
    )


def test_comments_are_no_part_of_the_key(cache):
    compiler = toolchain.find()

    def key(text: str) -> str:
        return digest.key(Source("cpp", text, ("segment_0",), {}), Target(), compiler)

    assert key("int a = b / c;  // model.py:3\n// x\nint d;") == key("int a = b / c;  // model.py:4\n// y\nint d;")
    assert key("int a = b;\n") != key("int a = c;\n")
    assert key('f("// x");') != key('f("// y");')
    assert digest.meaning("// a\nx / y // z\n") == "\nx / y\n"


def flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes((data[middle] ^ 1,)) + data[middle + 1 :]


DAMAGE = {
    "truncated": lambda d: d[: len(d) // 2],
    "flipped": flip,
    "empty": lambda d: b"",
    "longer": lambda d: d + b"x",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_entry_is_built_again(cache, damage):
    artifact = build(source(), Target())
    path = artifact.path
    del artifact
    gc.collect()
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(DAMAGE[damage](data))
    before = toolchain.RUNS
    with record.record() as events:
        artifact = build(source(), Target())
    assert toolchain.RUNS == before + 1 and events[0].data["damaged"]
    assert call(artifact, torch.arange(4.0))[1].tolist() == [3, 5, 7, 9]


def test_code_is_unloaded_with_its_artifact(cache):
    def mapped() -> bool:
        with open("/proc/self/maps") as maps:
            return str(cache) in maps.read()

    if not os.path.exists("/proc/self/maps"):
        pytest.skip("no /proc")
    artifact = build(source(), Target())
    assert mapped()
    del artifact
    gc.collect()
    assert not mapped()


def test_cache_can_be_switched_off(cache, monkeypatch):
    monkeypatch.setenv("TP_CACHE", "0")
    before = toolchain.RUNS
    build(source(), Target())
    build(source(), Target())
    assert toolchain.RUNS == before + 2


def test_least_recently_used_goes_first(cache, monkeypatch):
    artifacts = [build(source(float(k)), Target()) for k in range(3)]
    for age, artifact in enumerate(artifacts):
        for file in artifact.path.parent.glob(artifact.key + "*"):
            os.utime(file, (1000 + age, 1000 + age))
    files = [artifact.path for artifact in artifacts]
    del artifacts, artifact
    gc.collect()
    build(source(0.0), Target())  # found on disk: now the most recently used
    store.trim(files[0].stat().st_size + files[2].stat().st_size + 100)
    assert files[0].exists() and not files[1].exists()
    assert 0 < store.size() <= files[0].stat().st_size + files[2].stat().st_size + 100
    store.clear()
    assert store.size() == 0


def test_compiler_message_reaches_the_user(cache):
    broken = Source("cpp", "int main( { this is no C++ }", ("segment_0",), {})
    with pytest.raises(CompilerError, match="error:") as caught:
        build(broken, Target())
    path = next(line for line in str(caught.value).splitlines() if line.startswith("source: "))[8:]
    assert "this is no C++" in Path(path).read_text()
    with pytest.raises(RuntimeError):
        build(broken, Target())


def test_missing_compiler_is_named(cache, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler-here")
    with pytest.raises(CompilerError, match="no-such-compiler-here"):
        build(source(), Target())
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(cache))
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CompilerError, match=r"install g\+\+"):
        build(source(), Target())


def test_silent_compiler_is_named(cache, monkeypatch):
    monkeypatch.setenv("CXX", "/bin/true")
    with pytest.raises(CompilerError, match="writes no object file"):
        build(source(), Target())


def test_full_disk_names_the_folder(cache, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(CompilerError, match="No space left on device; TP_CACHE_DIR"):
        build(source(), Target())
    assert not list(cache.glob("**/.new-*"))


def test_setting_that_is_no_number_is_named(monkeypatch):
    monkeypatch.setenv("TP_VERSION_LIMIT", "many")
    with pytest.raises(TensorPlayError, match="TP_VERSION_LIMIT='many' is not a whole number"):
        config.number("version_limit")


def test_unwritable_folder_falls_back(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TP_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert build(source(4.0), Target()).built


PROCESS = textwrap.dedent("""
    import sys
    sys.path.insert(0, {root!r})
    from tests.artifacts.test_build import build, call, source, Target, toolchain, torch
    import subprocess
    if {no_process}:
        subprocess.run = None
    code, out = call(build(source(), Target()), torch.arange(4.0))
    assert out.tolist() == [3, 5, 7, 9]
    print("RUNS", toolchain.RUNS)
""")


def process(no_process: bool = False) -> subprocess.Popen:
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    text = PROCESS.format(root=root, no_process=no_process)
    return subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True, env=dict(os.environ))


def runs(p: subprocess.Popen) -> int:
    out, _ = p.communicate(timeout=120)
    assert p.returncode == 0
    return int(out.split("RUNS")[1])


def test_processes_race_for_one_key(cache):
    assert sum(runs(p) for p in [process() for _ in range(4)]) == 1


def test_warm_start_runs_no_process_at_all(cache):
    assert runs(process()) == 1
    assert runs(process(no_process=True)) == 0


def test_killed_builder_leaves_nothing_half_done(cache, tmp_path, monkeypatch):
    slow = tmp_path / "slow.sh"
    slow.write_text('#!/bin/sh\n[ "$1" = --version ] && exec g++ --version\nsleep 30\nexec g++ "$@"\n')
    slow.chmod(0o755)
    environment = dict(os.environ, CXX=str(slow))
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    text = PROCESS.format(root=root, no_process=False)
    p = subprocess.Popen([sys.executable, "-c", text], env=environment, start_new_session=True)
    deadline = time.time() + 60
    while not list(cache.glob("*/*.cpp")) and time.time() < deadline:
        time.sleep(0.05)
    time.sleep(0.2)
    os.killpg(p.pid, signal.SIGKILL)
    p.wait()
    assert not list(cache.glob("*/*.so"))
    slow.write_text('#!/bin/sh\nexec g++ "$@"\n')
    monkeypatch.setenv("CXX", str(slow))
    assert build(source(), Target()).built


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="names an AVX2 symbol")
def test_sleef_is_linked_where_it_is_used(cache):
    text = """
    typedef float eight __attribute__((vector_size(32)));
    extern "C" eight Sleef_sinf8_u10(eight);
    extern "C" int segment_0(void *const *p, int threads) {
      const float *x = (const float *)p[0];
      const eight y = Sleef_sinf8_u10(eight{x[0], x[1], x[2], x[3]});
      for (int i = 0; i < 4; i++) ((float *)p[1])[i] = y[i];
      return 0;
    }
    """
    artifact = build(Source("cpp", text, ("segment_0",), {}, (), ("-mavx2",)), Target())
    x = torch.tensor([0.0, 0.5, 1.0, 100.0])
    assert call(artifact, x)[1].allclose(x.sin())

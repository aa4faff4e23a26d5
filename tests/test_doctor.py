"""``gpuq doctor`` tells the truth: on this machine, and on machines made worse for each test."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import system
from typer.testing import CliRunner

import gpuq
from gpuq.cli import app
from gpuq.config import LoaderConfig
from gpuq.doctor import Finding, diagnose, obstacles
from gpuq.doctor.finding import checked
from gpuq.doctor.gpu import examine_gpu
from gpuq.doctor.mounts import longest_prefix, mount_of, parse_mountinfo
from gpuq.doctor.paths import examine_path
from gpuq.doctor.trial import TRIAL_BYTES, fault_of, pull_first
from gpuq.host.uring_abi import ring_bytes
from gpuq.pull_files import Pull, PulledArray
from gpuq.targets import choose_device

COMMAND = """
from gpuq.cli import main
sys.argv = ["gpuq", "doctor", *sys.argv[1:]]
main()
"""


def find(findings: Sequence[Finding], name: str, path: str = "") -> Finding:
    (found,) = [f for f in findings if (f.name, f.path) == (name, path)]
    return found


def run_doctor(*paths: object, **worse: Any) -> tuple[int, list[Finding]]:
    """Run the command as JSON on a machine made worse; return its exit code and findings."""
    clean = {"GPUQ_TARGET": None, "GPUQ_READER": None, "GPUQ_DIRECT": None}
    environment = clean | worse.pop("environment", {})
    done = system.run_python(COMMAND, "--json", *paths, environment=environment, **worse)
    assert done.stdout, done.stderr
    document = json.loads(done.stdout)
    findings = [Finding(**finding) for finding in document["findings"]]
    assert document["ok"] == (done.returncode == 0) == (obstacles(findings) == [])
    assert document["stopped_by"] == obstacles(findings)
    for obstacle in obstacles(findings):
        assert f"gpuq: {obstacle}\n" in done.stderr
    return done.returncode, findings


# --- this machine ---


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Finding]]:
    """A directory, and the findings of this machine and of it."""
    folder = tmp_path_factory.mktemp("doctor")
    return folder, diagnose([str(folder)])


def test_every_question_of_the_machine_has_one_answer(here: tuple[Path, list[Finding]]) -> None:
    names = [finding.name for finding in here[1] if not finding.path]
    assert len(names) == len(set(names))
    assert set(names) >= {
        "Python",
        "numba",
        "numba-cuda",
        "CuPy",
        "CUDA driver",
        "CUDA_MODULE_LOADING",
        "simulator",
        "target",
        "io_uring",
        "reader",
        "locked memory",
        "open files",
        "code cache",
        "trial",
    }
    assert obstacles(here[1]) == []


def test_what_it_says_is_what_a_loader_does(here: tuple[Path, list[Finding]]) -> None:
    folder, findings = here
    path = folder / "file"
    path.write_bytes(bytes(10_000))
    with gpuq.Loader() as loader:
        explanation = loader.explain(loader.open(path))
    path.unlink()
    assert find(findings, "target").value == explanation.target
    assert find(findings, "target").reason == explanation.target_reason
    assert find(findings, "reader").value == explanation.reader
    assert (find(findings, "direct read", str(folder)).ok == "yes") == explanation.direct
    assert find(findings, "direct read", str(folder)).reason == explanation.reason


def test_a_directory_is_left_as_it_was(here: tuple[Path, list[Finding]]) -> None:
    folder, findings = here
    assert os.listdir(folder) == []
    assert find(findings, "file", str(folder)).value == f"{TRIAL_BYTES:,} bytes"
    assert find(findings, "trial", str(folder)).ok == "yes"


def test_every_no_has_a_reason_and_advice(here: tuple[Path, list[Finding]]) -> None:
    for finding in here[1]:
        if finding.ok != "yes":
            assert finding.reason, finding
        if finding.ok == "no":
            assert finding.advice, finding


def test_the_table_fits_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = CliRunner().invoke(app, ["doctor", str(tmp_path)])
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines == [line.rstrip() for line in lines]
    assert lines[-1].startswith("A kernel can pull files here")
    assert str(tmp_path) in lines
    assert result.exit_code == 0


# --- paths that cannot be read ---


def test_a_missing_path_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    result = CliRunner().invoke(app, ["doctor", str(missing)])
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == f"gpuq: {missing}: No such file or directory"


@pytest.mark.parametrize("kind", ["fifo", "loop"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(path)
    findings = examine_path(str(path), LoaderConfig(), None)
    (line,) = obstacles(findings)
    assert line.startswith(f"{path}: ")
    assert line.count(str(path)) == 1


def test_what_may_not_be_read_or_written_is_said(tmp_path: Path) -> None:
    secret, closed = tmp_path / "secret", tmp_path / "closed"
    secret.write_bytes(b"x")
    secret.chmod(0)
    closed.mkdir()
    closed.chmod(0o555)
    dropped = system.CAP_FILES if os.geteuid() == 0 else ()
    code, findings = run_doctor(secret, closed, dropped=dropped)
    assert obstacles(findings) == [f"{secret}: Permission denied"]
    folder = find(findings, "file", str(closed))
    assert folder.ok == "unknown"
    assert "Permission denied" in folder.reason
    assert code == 1


def test_an_empty_file_proves_nothing(tmp_path: Path, loader: gpuq.Loader) -> None:
    path = tmp_path / "empty"
    path.touch()
    findings = examine_path(str(path), LoaderConfig(), loader)
    assert find(findings, "file", str(path)).value == "0 bytes"
    assert find(findings, "trial", str(path)).ok == "unknown"
    assert find(findings, "direct read", str(path)).ok in ("unknown", "no")
    assert obstacles(findings) == []


def test_a_path_whose_check_breaks_does_not_pass() -> None:
    (finding,) = checked("file", lambda: examine_path("a\0b", LoaderConfig(), None), "a\0b")
    assert (finding.ok, finding.reason) == ("stops", "the check failed: embedded null byte")


def test_a_kernel_that_does_not_come_back_is_told_to(
    tmp_path: Path, loader: gpuq.Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pull_nothing(loader: gpuq.Loader, entries: Any, **given: Any) -> Any:
        entry = entries[0]
        while loader.state != gpuq.State.ABORTED:
            pass
        array = PulledArray(entry, gpuq.Status.ABORTED, 0, None, 0)
        return Pull((array,), (), entry.nbytes, 0.0, 0, 0, 0)

    monkeypatch.setattr("gpuq.doctor.trial._SECONDS", 0.01)
    monkeypatch.setattr("gpuq.doctor.trial.pull_arrays", pull_nothing)
    assert fault_of(pull_first(loader, str(tmp_path), 1)) == "a kernel got ABORTED"


# --- file systems ---


@pytest.fixture
def loader() -> Any:
    with gpuq.Loader(target="cpu", staging_buffers=4, staging_bytes=8192) as loader:
        yield loader


def test_ext4_on_sectors_of_4096_bytes(tmp_path: Path, loader: gpuq.Loader) -> None:
    with system.ext4(tmp_path, sector_bytes=4096) as place:
        findings = examine_path(str(place), LoaderConfig(), loader)
    assert find(findings, "file system", str(place)).value == "ext4"
    assert find(findings, "file system", str(place)).reason.startswith("/dev/loop")
    alignment = find(findings, "alignment", str(place))
    assert alignment.ok == "unknown" or "offsets by 4096" in alignment.value
    assert find(findings, "direct read", str(place)).ok == "yes"
    assert find(findings, "direct read", str(place)).reason.startswith(
        "O_DIRECT, offsets of 4096 bytes"
    )
    assert find(findings, "trial", str(place)).reason.startswith("a kernel pulled them with direct")


def test_squashfs_has_no_direct_reads_and_no_place_for_a_file(
    tmp_path: Path, loader: gpuq.Loader
) -> None:
    content = os.urandom(TRIAL_BYTES + 1)
    with system.squashfs(tmp_path, {"weights.bin": content}) as place:
        assert (place / "weights.bin").read_bytes() == content
        path = str(place / "weights.bin")
        findings = examine_path(path, LoaderConfig(), loader)
        folder = examine_path(str(place), LoaderConfig(), loader)
        required = examine_path(path, LoaderConfig(direct="require"), loader)
    assert find(findings, "file system", path).value == "squashfs"
    assert "read-only" in find(findings, "file system", path).reason
    direct = find(findings, "direct read", path)
    assert (direct.ok, "EINVAL" in direct.reason) == ("no", True)
    assert find(findings, "trial", path).ok == "yes"
    assert "buffered reads" in find(findings, "trial", path).reason
    assert obstacles(findings) == []
    assert find(folder, "file", str(place)).ok == "unknown"
    assert "Read-only file system" in find(folder, "file", str(place)).reason
    assert obstacles(folder) == []
    (line,) = obstacles(required)
    assert line.startswith(f"{path}: GPUQ_DIRECT=require, but ")


def test_overlay_answers_for_the_layer_that_holds_the_file(
    tmp_path: Path, loader: gpuq.Loader
) -> None:
    lower = {"lower.bin": os.urandom(TRIAL_BYTES)}
    with (
        system.squashfs(tmp_path, lower) as bottom,
        system.overlay(tmp_path, bottom) as place,
    ):
        (place / "upper.bin").write_bytes(os.urandom(TRIAL_BYTES))
        answers = {}
        for name in ("lower.bin", "upper.bin"):
            path = str(place / name)
            findings = examine_path(path, LoaderConfig(), loader)
            assert find(findings, "file system", path).value == "overlay"
            assert find(findings, "trial", path).ok == "yes"
            answers[name] = find(findings, "direct read", path).ok
        on_disk = examine_path(str(tmp_path), LoaderConfig(), loader)
    assert answers["lower.bin"] == "no"
    assert answers["upper.bin"] == find(on_disk, "direct read", str(tmp_path)).ok


def test_a_block_device_is_on_no_file_system(tmp_path: Path, loader: gpuq.Loader) -> None:
    image = tmp_path / "image"
    image.write_bytes(os.urandom(1 << 20))
    with system.loop_device(image, sector_bytes=4096) as device:
        findings = examine_path(device, LoaderConfig(), loader)
    assert find(findings, "file system", device).value == "none"
    assert find(findings, "file", device).value == "1,048,576 bytes"
    assert find(findings, "direct read", device).ok == "yes"
    assert find(findings, "trial", device).ok == "yes"


def test_tmpfs(tmp_path: Path, loader: gpuq.Loader) -> None:
    with system.mounted(tmp_path / "tmpfs", "tmpfs", "none") as place:
        findings = examine_path(str(place), LoaderConfig(), loader)
        with open(place / "file", "wb") as file:
            file.write(bytes(8192))
        try:
            os.close(os.open(place / "file", os.O_RDONLY | os.O_DIRECT))
            opens = True
        except OSError:
            opens = False
    assert find(findings, "file system", str(place)).value == "tmpfs"
    assert (find(findings, "direct read", str(place)).ok == "yes") == opens
    assert find(findings, "trial", str(place)).ok == "yes"


def test_a_full_file_system_is_not_checked(tmp_path: Path, loader: gpuq.Loader) -> None:
    with system.mounted(tmp_path / "full", "tmpfs", "none", "size=8k") as place:
        findings = examine_path(str(place), LoaderConfig(), loader)
        assert os.listdir(place) == []
    assert find(findings, "file", str(place)).ok == "unknown"
    assert "No space left" in find(findings, "file", str(place)).reason


# --- mounts ---

MOUNTINFO = """\
22 1 0:21 / / rw,relatime - ext4 /dev/vda rw
23 22 0:22 / /data rw shared:1 master:2 - xfs /dev/vdb rw,attr2
24 22 0:23 / /data rw - tmpfs none rw
25 22 0:24 / /my\\040disk\\134 ro - fuse.sshfs me@there:/x\\040y rw
26 22 7:0 / /image rw - squashfs /dev/loop0 ro
"""


@pytest.mark.parametrize(
    ("place", "number"),
    [
        ("/", 22),
        ("/dataset", 22),
        ("/data", 24),
        ("/data/x", 24),
        ("/my disk\\/x", 25),
        ("/image/a/b", 26),
    ],
)
def test_the_longest_prefix_that_is_on_top_wins(place: str, number: int) -> None:
    mount = longest_prefix(parse_mountinfo(MOUNTINFO), place)
    assert mount is not None
    assert mount.number == number


def test_mountinfo_is_read_as_the_kernel_escapes_it() -> None:
    disk, image = parse_mountinfo(MOUNTINFO)[3:]
    assert (disk.point, disk.kind, disk.source) == ("/my disk\\", "fuse.sshfs", "me@there:/x y")
    assert disk.is_read_only
    assert image.is_read_only


def test_a_mount_hidden_below_another_is_not_taken(tmp_path: Path) -> None:
    outer, inner = tmp_path / "outer", tmp_path / "outer" / "inner"
    with (
        system.mounted(inner, "tmpfs", "hidden"),
        system.mounted(outer, "tmpfs", "covering"),
    ):
        inner.mkdir()
        mount = mount_of(str(inner))
        inner.rmdir()
    assert mount is not None
    assert mount.source == "covering"


# --- io_uring refused, really ---

REFUSED = "io_uring is refused with "


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        ({"io_uring_setup": errno.EPERM}, "a seccomp filter"),
        ({"io_uring_setup": errno.ENOSYS}, "a seccomp filter hides it"),
        ({"io_uring_enter": errno.EPERM}, "was set up, but a read with it failed"),
    ],
    ids=["setup EPERM", "setup ENOSYS", "enter EPERM"],
)
def test_a_seccomp_filter_is_told_from_the_sysctl(refused: dict[str, int], reason: str) -> None:
    code, findings = run_doctor(refused=refused)
    io_uring, reader = find(findings, "io_uring"), find(findings, "reader")
    (number,) = refused.values()
    assert (io_uring.ok, io_uring.value) == ("no", errno.errorcode[number])
    assert reason in io_uring.reason
    assert "the sysctl" not in io_uring.reason
    assert (reader.ok, reader.value, reader.reason) == ("degraded", "threads", io_uring.reason)
    assert find(findings, "trial").ok == "yes"
    assert code == 0


@pytest.mark.parametrize("setting", [1, 2])
def test_the_sysctl_is_told_from_a_seccomp_filter(setting: int, tmp_path: Path) -> None:
    # The kernel's own sysctl is not touched: others would lose their rings.
    shown = tmp_path / "sysctl"
    shown.write_text(f"{setting}\n")
    snippet = "from gpuq.host.uring_abi import map_ring; map_ring(4, 0)"
    done = system.run_python(
        snippet,
        refused={"io_uring_setup": errno.EPERM},
        before=f"mount --bind {shown} /proc/sys/kernel/io_uring_disabled",
    )
    assert f"{REFUSED}EPERM: the sysctl kernel.io_uring_disabled is {setting}" in done.stderr


def test_asked_for_io_uring_that_is_refused_stops() -> None:
    code, findings = run_doctor(
        refused={"io_uring_setup": errno.EPERM}, environment={"GPUQ_READER": "io_uring"}
    )
    assert code == 1
    assert find(findings, "reader").ok == "stops"
    assert "GPUQ_READER" in find(findings, "reader").advice
    assert find(findings, "trial").ok == "unknown"


# --- limits ---


def test_a_locked_memory_limit_that_the_ring_exceeds() -> None:
    need = ring_bytes(LoaderConfig.staging_buffers)
    dropped = [system.CAP_IPC_LOCK] if os.geteuid() == 0 else []
    # Whether the kernel counts rings is the kernel's business; the findings must agree with it.
    code, findings = run_doctor(limits={"RLIMIT_MEMLOCK": need - 4096}, dropped=dropped)
    io_uring, locked = find(findings, "io_uring"), find(findings, "locked memory")
    assert locked.value == f"limit {(need - 4096) // 1024} KiB"
    assert f"{need // 1024} KiB" in locked.reason
    assert (io_uring.ok, locked.ok) in (("no", "degraded"), ("yes", "yes"))
    if io_uring.ok == "no":
        assert "locked-memory limit" in io_uring.reason
        assert "ulimit -l" in locked.advice
    assert find(findings, "trial").ok == "yes"
    assert code == 0


def test_few_open_files_are_counted() -> None:
    code, findings = run_doctor(limits={"RLIMIT_NOFILE": 32})
    files = find(findings, "open files")
    assert (files.ok, files.value) == ("degraded", "limit 32")
    assert "the hard limit is 32" in files.advice
    assert code == 0


def test_too_few_open_files_stop_and_say_so() -> None:
    code, findings = run_doctor(limits={"RLIMIT_NOFILE": 6})
    assert code == 1
    assert "Too many open files" in " ".join(obstacles(findings))
    assert find(findings, "open files").ok == "degraded"


# --- code cache ---

CACHE = """
import dataclasses, json
from gpuq.doctor.software import find_code_cache
print(json.dumps(dataclasses.asdict(find_code_cache())))
"""


def test_a_read_only_home_and_package_leave_no_code_cache(tmp_path: Path) -> None:
    package = Path(gpuq.__file__).parent
    home = tmp_path / "home"
    home.mkdir()
    protect = "\n".join(
        f"mount --bind {place} {place}; mount -o remount,bind,ro {place}"
        for place in (package, home)
    )
    environment = {"HOME": str(home), "NUMBA_CACHE_DIR": None, "XDG_CACHE_HOME": None}
    done = system.run_python(CACHE, before=protect, environment=environment)
    assert done.returncode == 0, done.stderr
    cache = Finding(**json.loads(done.stdout))
    assert (cache.ok, cache.value) == ("degraded", "none")
    assert "NUMBA_CACHE_DIR" in cache.advice


def test_the_code_cache_is_where_the_variable_says(tmp_path: Path) -> None:
    done = system.run_python(CACHE, environment={"NUMBA_CACHE_DIR": str(tmp_path)})
    cache = Finding(**json.loads(done.stdout))
    assert cache.ok == "yes"
    assert cache.value.startswith(str(tmp_path))


def test_a_code_cache_that_is_switched_off() -> None:
    done = system.run_python(CACHE, environment={"GPUQ_CACHE": "0"})
    cache = Finding(**json.loads(done.stdout))
    assert (cache.ok, cache.value, cache.advice) == ("degraded", "off", "unset GPUQ_CACHE")


# --- settings and targets ---


def test_the_simulator_is_named_and_runs() -> None:
    code, findings = run_doctor(environment={"NUMBA_ENABLE_CUDASIM": "1"})
    assert find(findings, "simulator").value == "NUMBA_ENABLE_CUDASIM=1"
    assert find(findings, "target").value == "simulator"
    assert "simulator target" in find(findings, "trial").reason
    assert code == 0


def test_a_wrong_setting_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUQ_READER", "magic")
    (line,) = obstacles(diagnose())
    assert line.startswith("settings: GPUQ_READER: ")


def test_direct_switched_off_says_what_would_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUQ_DIRECT", "off")
    findings = diagnose([str(tmp_path)])
    direct = find(findings, "direct read", str(tmp_path))
    if direct.ok == "no":
        pytest.skip(f"no direct reads here: {direct.reason}")
    assert direct.ok == "degraded"
    assert "GPUQ_DIRECT=off" in direct.reason
    assert "buffered" in find(findings, "trial", str(tmp_path)).reason


# --- GPUs that are not here ---


class FakeDriver:
    """A CUDA driver with one GPU, by the calls that gpuq makes."""

    def __init__(self, **given: int) -> None:
        self.attributes = {75: 9, 76: 0, 19: 1, 41: 1, 17: 0}
        numbers = {"unified": 41, "mapped": 19, "time_limit": 17, "major": 75}
        self.init = given.pop("init", 0)
        self.loading = given.pop("loading", 1)
        self.attributes.update({numbers[name]: value for name, value in given.items()})

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return self.init

    def cuGetErrorName(self, number: int, text: Any) -> int:  # noqa: N802
        text._obj.value = b"CUDA_ERROR_NO_DEVICE"
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = 1
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:  # noqa: N802
        return 0

    def cuDeviceGetName(self, name: Any, size: int, device: Any) -> int:  # noqa: N802
        name.value = b"Fake GPU"
        return 0

    def cuDriverGetVersion(self, version: Any) -> int:  # noqa: N802
        version._obj.value = 13020
        return 0

    def cuDeviceGetAttribute(self, value: Any, number: int, device: Any) -> int:  # noqa: N802
        value._obj.value = self.attributes[number]
        return 0

    def cuModuleGetLoadingMode(self, mode: Any) -> int:  # noqa: N802
        assert isinstance(mode._obj, ctypes.c_int)
        mode._obj.value = self.loading
        return 0


def test_a_gpu_that_is_fine() -> None:
    findings = examine_gpu(FakeDriver())
    assert {finding.ok for finding in findings} == {"yes"}
    assert find(findings, "CUDA driver").value.endswith("CUDA 13.2")
    assert find(findings, "GPU").value == "Fake GPU, compute capability 9.0"
    assert "gpuq sets it" in find(findings, "CUDA_MODULE_LOADING").reason


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"unified": 0}, "Fake GPU has no unified addressing"),
        ({"mapped": 0}, "Fake GPU cannot map host memory"),
        ({"major": 6}, "Fake GPU has compute capability 6.0; ld.acquire needs 7.0"),
    ],
    ids=["no unified addressing", "no mapped memory", "too old"],
)
def test_a_gpu_that_cannot_be_used(given: dict[str, int], reason: str) -> None:
    findings = examine_gpu(FakeDriver(**given))
    assert (find(findings, "GPU").ok, find(findings, "GPU").reason) == ("no", reason)
    assert find(findings, "mapped memory").ok == ("yes" if "major" in given else "no")


def test_a_kernel_time_limit() -> None:
    limit = find(examine_gpu(FakeDriver(time_limit=1)), "kernel time limit")
    assert (limit.ok, limit.value) == ("degraded", "on")


def test_lazy_loading_is_the_drivers_word_not_the_variables() -> None:
    loading = find(examine_gpu(FakeDriver(loading=2), "EAGER"), "CUDA_MODULE_LOADING")
    assert (loading.ok, loading.value) == ("degraded", "EAGER")
    loading = find(examine_gpu(FakeDriver(loading=1), "LAZY"), "CUDA_MODULE_LOADING")
    assert (loading.ok, loading.value) == ("yes", "LAZY")


def test_a_driver_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    driver = find(examine_gpu(FakeDriver(init=100)), "CUDA driver")
    assert driver.ok == "no"
    assert "cuInit said 100 (CUDA_ERROR_NO_DEVICE)" in driver.reason
    assert "CUDA_VISIBLE_DEVICES" in driver.advice


def test_cupy_that_cannot_use_the_gpu_leaves_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy made for a newer CUDA than the driver's raised its own error out of the Loader."""

    class CUDARuntimeError(Exception):
        pass

    def refuse() -> None:
        raise CUDARuntimeError("cudaErrorInsufficientDriver")

    runtime = types.SimpleNamespace(getDevice=refuse, CUDARuntimeError=CUDARuntimeError)
    cupy = types.ModuleType("cupy")
    cupy.cuda = types.SimpleNamespace(runtime=runtime)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr("gpuq.host.cuda_device.load_library", FakeDriver)
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
    device, reason = choose_device("auto")
    assert device.name == "cpu"
    assert reason.endswith("CuPy cannot use the GPU: cudaErrorInsufficientDriver")
    with pytest.raises(gpuq.TargetUnavailableError, match="CuPy cannot use"):
        choose_device("cuda")

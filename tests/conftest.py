import contextlib
import os
import subprocess

# Before JAX wakes up: eight CPU devices, so that meshes can be tested anywhere.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest


def pytest_configure(config):
    """The programs here run for milliseconds and compile for seconds: what one test has compiled, another one (or a command
    that it starts, or tomorrow's) reads from .pytest_cache."""
    folder = os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(config.cache.mkdir("jax")))
    seconds = os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", float(seconds))


# Tests compile far more than they compute: spare LLVM's optimisations. What XLA itself decides (fusion, memory) stays.
jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def x64():
    """Run the test with 64-bit types."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def optimized():
    """Compile as users do, for what depends on it."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def small_disk():
    """folder, size -> a context with a file system of its own there. Skips the test where mounting is not permitted."""

    @contextlib.contextmanager
    def small_disk(folder, size):
        folder.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            pytest.skip("mounting a tmpfs is not permitted here")
        try:
            yield folder
        finally:
            subprocess.run(["umount", "-l", str(folder)], check=True)

    return small_disk

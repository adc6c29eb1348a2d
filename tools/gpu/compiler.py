"""Compile programs for a GPU that is not there: ``python compiler.py TARGET PROGRAM.pb ...``, in the GPU environment.

XLA compiles for a device that is described, without GPU, driver or cuDNN, by the plugin for GPUs of JAX's packages. A
line of JSON goes to stdout for each program: bytes of arguments, outputs and temporaries, and seconds. What cuDNN's
convolutions work with is not in it, since XLA asks the device for that when it has one. The interfaces are private:
``tools/gpu.lock`` has the versions that they were read from (``jax/_src/lib``, ``xla/pjrt``).

This file imports nothing of the repository: the environment that it runs in has neither TensorFlow nor tf_memsaver.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple


class Target(NamedTuple):
    """A GPU as XLA's target specifications list it (``xla/backends/gpu/target_config/specs``); sizes in bytes."""

    capability: tuple[int, int]
    cores: int
    shared_per_block: int
    shared_per_core: int
    shared_per_block_optin: int
    threads_per_core: int
    l2_bytes: int
    memory_bytes: int
    bytes_per_second: int
    clock_ghz: float


TARGETS = {
    "h100": Target((9, 0), 132, 49152, 233472, 232448, 2048, 52428800, 84929347584, 3352320000000, 1.98),
    "a100": Target((8, 0), 108, 49152, 167936, 166912, 2048, 41943040, 42298834944, 1555200000000, 1.41),
    "t4": Target((7, 5), 40, 49152, 65536, 65536, 1024, 4194304, 15655829504, 320064000000, 1.59),
}


def description(name: str) -> str:
    """Return a target as the text of XLA's ``GpuTargetConfigProto``."""
    target = TARGETS[name]
    major, minor = target.capability
    return f"""
      gpu_device_info {{
        threads_per_block_limit: 1024 threads_per_warp: 32
        shared_memory_per_block: {target.shared_per_block} shared_memory_per_core: {target.shared_per_core}
        shared_memory_per_block_optin: {target.shared_per_block_optin}
        threads_per_core_limit: {target.threads_per_core} core_count: {target.cores} fpus_per_core: 64
        block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
        memory_bandwidth: {target.bytes_per_second} l2_cache_size: {target.l2_bytes}
        clock_rate_ghz: {target.clock_ghz} device_memory_size: {target.memory_bytes}
        cuda_compute_capability {{ major: {major} minor: {minor} }}
        registers_per_core_limit: 65536 registers_per_block_limit: 65536
      }}
      platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 7 }}
      runtime_version {{ major: 12 minor: 8 patch: 0 }} device_description_str: "{name}"
    """


def _device(name: str) -> Any:
    import jax_plugins.xla_cuda12 as plugin
    from jax._src.lib import xla_client

    [library] = Path(plugin.__file__).parent.glob("*.so")
    api = xla_client.load_pjrt_plugin_dynamically("cuda", str(library))
    topology = xla_client.make_c_api_device_topology(api, "cuda", topology="1x1x1", target_config=description(name))
    return topology._make_compile_only_devices()[0]


def _stable(program: bytes) -> Any:
    """Return a serialized HLO module as StableHLO, which plugins compile."""
    import jaxlib._hlo
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jaxlib.mlir import ir

    text = xla_client.XlaComputation(program).get_hlo_module().to_string()
    # A copy has no counterpart in StableHLO; a reshape to the same shape is one.
    text = re.sub(r" copy\(", " reshape(", text)
    module = jaxlib._hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()
    return ir.Module.parse(xla_client._xla.mlir.hlo_to_stablehlo(module), mlir.make_ir_context())


def compiled(device: Any, program: bytes) -> dict[str, Any]:
    """Return the bytes that a program takes on a device, and the seconds that compiling took."""
    import numpy as np
    from jax._src.lib import xla_client

    options = xla_client.CompileOptions()
    options.num_replicas = options.num_partitions = 1
    options.device_assignment = xla_client.DeviceAssignment.create(np.array([[device.id]], np.int32))
    stable, started = _stable(program), time.perf_counter()
    devices = xla_client._xla.DeviceList((device,))
    stats = device.client.compile(stable, devices, options).get_compiled_memory_stats()
    return {
        "argument_bytes": stats.argument_size_in_bytes,
        "output_bytes": stats.output_size_in_bytes,
        "temporary_bytes": stats.temp_size_in_bytes,
        "compile_seconds": time.perf_counter() - started,
    }


def main(arguments: list[str]) -> int:
    """Compile the programs, and print what each takes."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=false --xla_gpu_autotune_level=0")
    device = _device(arguments[0])
    for path in arguments[1:]:
        print(json.dumps(compiled(device, Path(path).read_bytes())), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

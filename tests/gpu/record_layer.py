"""Records the timeline of one MoE layer on the GPUs of one node, a process each, as a run's step 1.

    PYTHONPATH=. torchrun --nproc_per_node=2 tests/gpu/record_layer.py FOLDER
    python -m tools.timeline FOLDER

The bits with and without a timeline are compared first. One JSON line at the end: medians in ms of rank 0's launches,
without a timeline before and after, and with one.
"""

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

from recipes.launch_times import LayerInputs, measure_layer, run_layer
from recipes.timeline import StepTimeline
from tools.records import RUN_FILE
from uniep.kernels.config import default_config
from uniep.kernels.timeline import Timeline
from uniep.plan.layout import HeapLayout
from uniep.shapes import MoEShape
from uniep.symmetric.nvshmem import open_nvshmem
from uniep.symmetric.torch_symmetric import open_torch_symmetric


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--heap", choices=["nvshmem", "torch"], default="nvshmem")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--hidden-dim", type=int, default=768)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--calls", type=int, default=20)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    group = dist.group.WORLD
    assert group is not None
    shape = MoEShape(arguments.experts, arguments.top_k, arguments.dim, arguments.hidden_dim, group.size())
    open_heap = open_nvshmem if arguments.heap == "nvshmem" else open_torch_symmetric
    config = default_config(device)
    with open_heap(HeapLayout(shape, arguments.tokens, num_kept=1), group=group, device=device, timeout_s=60.0) as heap:
        inputs = LayerInputs.draw(heap, arguments.tokens)
        timeline = Timeline(device)
        # run_layer takes each launch once: from the start there is room for all rows that can come.
        heap.room.num_rows = heap.layout.max_rows

        def run(records: Timeline | None) -> list[torch.Tensor]:
            return run_layer(inputs, heap, config, timeline=records)[0]

        def times(records: Timeline | None) -> dict[str, float]:
            times_us, _ = measure_layer(inputs, heap, config, num_calls=arguments.calls, group=group, timeline=records)
            return {name: us / 1e3 for name, us in times_us.items()}

        expected = run(None)
        timeline.start()
        for want, got in zip(expected, run(timeline), strict=True):
            assert torch.equal(want, got)
        timeline.stop()
        line = {"shape": repr(shape), "off_ms": times(None), "on_ms": times(timeline), "off_again_ms": times(None)}
        names = StepTimeline(timeline, [1], str(arguments.folder)).end(1)
        heap.check()
        if heap.rank == 0:
            (arguments.folder / RUN_FILE).write_text(json.dumps({"timeline": names}))
            print(json.dumps(line), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

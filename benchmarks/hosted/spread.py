"""A check, not a race: a pipeline over one GPU and the CPU, which are two devices with real hops between them.

  1. the denoiser on the GPU, text encoders and decoder on the CPU; then the other way round: pictures beside those of
     plain diffusers on the GPU, and what each holds of the GPU awake and asleep;
  2. a folded arena: the part of one component on the GPU, which has memory for its chunks only, bit for bit.

    PYTHONPATH=src:. python -m benchmarks.hosted.spread --models FOLDER [--pipeline tiny-sdxl]

Runs in an interpreter with torch, Transformers and diffusers, on a machine with one NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any, Final

import diffusers
import numpy
import torch

from benchmarks.hosted.pipelines import SDXL, TINY, make_pipelines
from greenroom.workers.torch_host.control.resources import DeviceContext
from greenroom.workers.torch_host.control.slot_options import Opening, SlotOptions
from greenroom.workers.torch_host.images.pipeline import PipelineSource, read_pipeline
from greenroom.workers.torch_host.images.preparing import PreparedPipeline, prepare
from greenroom.workers.torch_host.weights.arena import view_of
from greenroom.workers.torch_host.weights.device_weights import DevicePart
from greenroom.workers.torch_host.weights.loading import load
from greenroom.workers.torch_host.weights.reading import LoadContext
from greenroom.workers.torch_host.weights.upload import CopyRate

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
MAPS: Final = {
    "texts and decoder on the CPU": {"text_encoder": 1, "text_encoder_2": 1, "vae": 1},
    "denoiser on the CPU": {"unet": 1},
}
# The mean difference of a colour, of 256: sums of another order differ, and steps make that larger.
MEAN_MAX: Final = 2.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--pipeline", choices=(TINY, SDXL), default=TINY)
    asked = parser.parse_args()
    make_pipelines(sys.executable, asked.models, asked.pipeline)
    folder = asked.models / asked.pipeline
    side = 64 if asked.pipeline == TINY else 512
    said: dict[str, Any] = {"prompt": "a cat", "num_inference_steps": 3, "width": side, "height": side}
    torch.set_grad_enabled(False)
    wanted = _painted(diffusers.DiffusionPipeline.from_pretrained(folder, dtype=torch.float32).to(GPU), said)
    torch.cuda.empty_cache()
    differences = {name: _difference(folder, name, places, said, wanted) for name, places in MAPS.items()}
    is_restored = _is_restored(folder)
    figures = {"gpu": torch.cuda.get_device_name(GPU), "pipeline": asked.pipeline, "mean_difference": differences}
    goals = {"mean_difference": f"at most {MEAN_MAX} of 256", "parts": "equal bit for bit"}
    met = is_restored and all(difference <= MEAN_MAX for difference in differences.values())
    print(json.dumps({"bench": "hosted.spread", "figures": figures, "goals": goals, "met": met}))
    return 0 if met else 1


def _painted(pipeline: Any, said: dict[str, Any]) -> Any:
    return numpy.asarray(pipeline(**said, generator=torch.Generator("cpu").manual_seed(7)).images[0]).astype(int)


def _difference(folder: Path, name: str, places: dict[str, int], said: dict[str, Any], wanted: Any) -> float:
    """The mean difference of a colour after the second wake."""
    memory = os.memfd_create("arena")
    around = DeviceContext(GPU, CopyRate(), on_fatal=lambda error, say: say(), others=(CPU,))
    order = SlotOptions("s", "painter", folder, Path("/unused"), dtype="float32", device_map=places)
    made: PreparedPipeline = prepare(order, memory, around, Opening())
    asleep = torch.cuda.mem_get_info(GPU)[0]
    for turn in ("first", "second"):
        woken = made.weights.wake()
        difference = numpy.abs(_painted(made.engine.pipelines["text"], said) - wanted)
        torch.cuda.synchronize(GPU)
        made.weights.sleep()
        back = asleep - torch.cuda.mem_get_info(GPU)[0]
        print(
            f"{name}, {turn} wake: {woken.each_device_bytes} bytes on {[str(one) for one in made.weights.devices]},"
            f" difference mean {difference.mean():.3f} max {difference.max()}, {back:,} bytes not back"
        )
    made.close()
    os.close(memory)
    return round(float(difference.mean()), 3)


def _is_restored(folder: Path) -> bool:
    """True if each component arrives whole where only its chunks have memory."""
    memory = os.memfd_create("arena")
    trusts = {"trust_remote_code": False, "allow_pickle": False}
    source = PipelineSource(read_pipeline(folder, "bfloat16", **trusts), "bfloat16", **trusts)
    whole = load(source, os.memfd_create("whole"), False, LoadContext())
    loaded = load(source, memory, False, LoadContext(folds=True))
    folded = sum(chunk.fold is not None for chunk in loaded.arena.chunks)
    is_good = True
    for name, component in loaded.module.named_children():
        part = DevicePart(GPU, [name], loaded.arena, CopyRate())
        part.bind(loaded.module)
        part.arena.map()
        assert part.upload is not None
        part.upload.begin(component)
        part.upload.wait_for_weights()
        part.upload.finish()
        names = [key for key in loaded.arena.layout.places if key.startswith(f"{name}.")]
        equal = all(
            torch.equal(
                view_of(part.arena.tensor, loaded.arena.layout.places[key]).cpu(),
                view_of(whole.arena.tensor, whole.arena.layout.places[key]),
            )
            for key in names
        )
        mapped = f"{part.arena.size:,} of {loaded.arena.layout.bytes:,} bytes mapped"
        print(f"{name}: {len(names)} tensors, {mapped}, equal: {equal}")
        is_good &= equal
        part.arena.unmap()
    print(f"{folded} of {len(loaded.arena.chunks)} chunks were folded")
    return is_good


if __name__ == "__main__":
    sys.exit(main())

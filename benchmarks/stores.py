"""The time to read an image from a local S3 server, beside other ways to read it.

The server is moto's; its own time is part of every figure. Rows:

- s3 images: ImageFolder on s3://, beside a boto3 resource made for each item, as in the dataset of
  dask-pytorch-ddp. Both read the same images batch by batch and decode them.
- s3 shards: the same images in tar shards, through an empty cache, beside the same floor.
- node cache: a second epoch of s3:// from the node's cache, beside the same images as local files.

Each measurement is the seconds per sample in a new process, after a warm-up. Images are small (64 x
64 pixels, 2 kB), so that decoding does not hide the cost of reading.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

from benchmarks.measure import Row
from benchmarks.site import PYTHON, Site, output
from hpcddp.attempt.rendezvous import free_port
from hpcddp.errors import HpcddpError

IMAGES, FEW, CLASSES, BATCH = 2000, 100, 4, 32
RESOURCE_LIMIT, SHARDS_LIMIT, CACHE_LIMIT = 1 / 5, 1 / 30, 1 / 0.8
KEYS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
# argv: root, cache folder or "", images, epochs; prints the seconds per sample of the last epoch.
OURS = f"""
import sys, time
from pathlib import Path
import numpy as np
from hpcddp.data import ImageFolder
from hpcddp.data.node_cache.cache import Cache
root, cache, count, epochs = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
def opened(folder):
    return ImageFolder(root, np.asarray, cache=Cache(Path(folder), 1 << 30) if folder else None)
if epochs == 1:  # make clients and imports, with another cache
    opened(cache and cache + "-warm").__getitems__(list(range({BATCH})))
data = opened(cache)
for _ in range(epochs):
    began = time.perf_counter()
    for start in range(0, count, {BATCH}):
        data.__getitems__(list(range(start, min(count, start + {BATCH}))))
print((time.perf_counter() - began) / count)
"""
RESOURCE = """
import io, sys, time
import boto3
import numpy as np
from PIL import Image
count, endpoint = int(sys.argv[1]), sys.argv[2]
client = boto3.client("s3", endpoint_url=endpoint)
names = [o["Key"] for o in client.list_objects_v2(Bucket="images", Prefix="train/")["Contents"]]
def read(name):
    data = io.BytesIO()
    boto3.resource("s3", endpoint_url=endpoint).Bucket("images").download_fileobj(name, data)
    return np.asarray(Image.open(data).convert("RGB"))
read(names[0])
began = time.perf_counter()
for name in names[:count]:
    read(name)
print((time.perf_counter() - began) / count)
"""


def rows(site: Site) -> Iterator[Row]:
    local = site.fresh() / "train"
    _draw(local)
    shards = site.fresh() / "shards"
    output([PYTHON, "-m", "hpcddp.data", "pack", str(local), str(shards)], site.environ, local)
    with _server(site) as environ:
        _upload(environ, {"train": local, "shards": shards})

        def ours(root: str, count: int, *, cache: bool = False, epochs: int = 1) -> float:
            folder = str(site.fresh()) if cache else ""
            words = [PYTHON, "-c", OURS, root, folder, str(count), str(epochs)]
            return float(output(words, environ, site.folder))

        def resource() -> float:
            words = [PYTHON, "-c", RESOURCE, str(FEW), environ["AWS_ENDPOINT_URL"]]
            return float(output(words, environ, site.folder))

        images, packed, floor = site.interleave(
            "stores",
            lambda: ours("s3://images/train", IMAGES // 4),
            lambda: ours("s3://images/shards", IMAGES, cache=True),
            resource,
        )
        yield Row("s3 images", images, floor, ratio_limit=RESOURCE_LIMIT)
        yield Row("s3 shards", packed, floor, ratio_limit=SHARDS_LIMIT)
        kept, files = site.interleave(
            "node cache",
            lambda: ours("s3://images/train", IMAGES, cache=True, epochs=2),
            lambda: ours(str(local), IMAGES, epochs=2),
        )
        yield Row("node cache", kept, files, ratio_limit=CACHE_LIMIT)


def _draw(folder: Path) -> None:
    import numpy as np
    from PIL import Image

    drawn = np.random.default_rng(0)
    for i in range(IMAGES):
        small = Image.fromarray(drawn.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        path = folder / f"class-{i % CLASSES}" / f"{i:05}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        small.resize((64, 64)).save(path, quality=85)


@contextmanager
def _server(site: Site) -> Iterator[dict[str, str]]:
    """Start moto's server; return the environment of processes that read from it."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    words = [PYTHON, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    kept = {name: value for name, value in site.environ.items() if not name.startswith("AWS_")}
    environ = kept | KEYS | {"AWS_ENDPOINT_URL": url, "AWS_DEFAULT_REGION": KEYS["AWS_REGION"]}
    process = subprocess.Popen(
        words, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                with urlopen(f"{url}/moto-api/"):
                    break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise HpcddpError(
                        "moto's server does not start", hint="install the extra `test` of hpcddp"
                    ) from None
                time.sleep(0.1)
        yield environ
    finally:
        process.kill()
        process.wait()


def _upload(environ: dict[str, str], folders: dict[str, Path]) -> None:
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=environ["AWS_ENDPOINT_URL"],
        region_name=KEYS["AWS_REGION"],
        aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
    )
    client.create_bucket(Bucket="images")
    for name, folder in folders.items():
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            key = f"{name}/{path.relative_to(folder)}"
            client.put_object(Bucket="images", Key=key, Body=path.read_bytes())

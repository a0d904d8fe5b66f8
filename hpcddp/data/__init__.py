"""Data from where it lies: folders of images and tar shards, local or in an object store."""

from hpcddp.data.images import ImageFolder, S3ImageFolder
from hpcddp.data.packing import pack

__all__ = ["ImageFolder", "S3ImageFolder", "pack"]

"""Data from where it lies: folders of images and tar shards, local or in an object store."""

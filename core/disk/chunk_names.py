"""Names of chunks in files: a digest of all that their keys and values depend on."""

from __future__ import annotations

import hashlib

import numpy as np

from core.types.arrays import Ints

TENANT: int = 16
"""Hexadecimal digits of a name that tell its tenant from others."""


def chunk_names(stamp: str, namespace: str, tenant: str, ids: Ints, chunk: int) -> list[str]:
    """One for each whole chunk of `ids`, int64[n]: of its tokens and all before them.

    `stamp`: of the model. `namespace`: the name of what may share prefixes, the same in every process.
    """
    told = hashlib.sha256(f"{len(stamp)} {len(namespace)} {stamp}{namespace}".encode(errors="surrogatepass"))
    whole, prefix = np.ascontiguousarray(ids, np.int64), tenant_digits(tenant)
    found = []
    for end in range(chunk, len(whole) + 1, chunk):
        told.update(whole[end - chunk : end].data)
        found.append(prefix + told.hexdigest())
    return found


def ending_name(stamp: str, namespace: str, tenant: str, before: str, tail: Ints) -> str:
    """Of what rows hold beside keys, behind the tokens `tail`, int64[n], which follow the chunk with the name `before`.

    `before`: empty where no whole chunk comes before.
    """
    told = hashlib.sha256(f"{len(stamp)} {len(namespace)} {stamp}{namespace}{before}\0".encode(errors="surrogatepass"))
    told.update(np.ascontiguousarray(tail, np.int64).data)
    return tenant_digits(tenant) + told.hexdigest()


def tenant_digits(tenant: str) -> str:
    """With which all names of chunks of `tenant` begin."""
    return hashlib.sha256(tenant.encode(errors="surrogatepass")).hexdigest()[:TENANT]

"""Reads the MTP layer of a checkpoint that our own decoder runs."""

import re

from slipstream.checkpoints.checkpoint import Checkpoint
from slipstream.checkpoints.config import DecoderConfig
from slipstream.checkpoints.weights import Weights, find_mtp_name, load_weights
from slipstream.errors import UnsupportedModelError
from slipstream.heads.mtp_names import FAMILIES as MTP_FAMILIES, check_stored, find_mtp_layers


def load_mtp_layer(target: Checkpoint) -> Weights:
    """Return the weights of the only MTP layer of a checkpoint, read on access; `config` describes the layer. Raises
    the family of LoadError for another number of layers, and for missing, unknown or misshapen tensors."""
    decoder = DecoderConfig.load(target)
    target.download()
    stored, promised = find_mtp_layers(target)
    check_stored(target, stored, promised)
    if stored > 1:
        raise UnsupportedModelError(
            f"drafter 'mtp' does not work with {target}, which has {stored} MTP layers",
            why="our own decoder supports only one MTP layer, which it runs again for each draft token",
            fix="load the target with executor='transformers', or choose another drafter",
        )
    return load_weights(target, describe_mtp_layer(target, decoder))


def describe_mtp_layer(target: Checkpoint, decoder: DecoderConfig) -> DecoderConfig:
    """Return the configuration of the MTP layer that follows a decoder. The tensors show whether it has experts."""
    sparse = any(_ROUTER.search(name) for name in _list_names(target, decoder))
    return decoder.mtp_layer(sparse, MTP_FAMILIES[decoder.model_type].config.get("chain_hidden_post_norm", True))


def count_stored_bytes(target: Checkpoint, decoder: DecoderConfig) -> int:
    """Count the bytes of the MTP layer in the checkpoint's files, which must have been downloaded."""
    sizes = (
        {t.name: t.nbytes for t in target.header.tensors}
        if target.is_gguf
        else {name: tensor.nbytes for name, tensor in target.tensors.items()}
    )
    return sum(sizes[name] or 0 for name in _list_names(target, decoder))


_ROUTER = re.compile(r"\.(mlp\.gate|ffn_gate_inp)\.weight$")


def _list_names(target: Checkpoint, decoder: DecoderConfig) -> list[str]:
    """List the names of the MTP layer's tensors in the files."""
    if target.is_gguf:
        return [t.name for t in target.header.tensors if t.name.startswith(f"blk.{decoder.layers}.")]
    return [name for name in target.tensor_names if find_mtp_name(name, decoder) is not None]

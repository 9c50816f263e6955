"""Layers: plain dataclasses of arrays, each with ``layer(x)`` and ``layer.vjp(x)``. See ``nn.layer``."""

from npattn.nn import init as init
from npattn.nn.activation import GELU as GELU
from npattn.nn.activation import Dropout as Dropout
from npattn.nn.activation import SiLU as SiLU
from npattn.nn.attention import CausalMultiHeadAttention as CausalMultiHeadAttention
from npattn.nn.attention import MultiHeadAttention as MultiHeadAttention
from npattn.nn.block import TransformerBlock as TransformerBlock
from npattn.nn.embedding import Embedding as Embedding
from npattn.nn.layer import Layer as Layer
from npattn.nn.linear import Linear as Linear
from npattn.nn.linear_attention import LinearMultiHeadAttention as LinearMultiHeadAttention
from npattn.nn.memory import keep_freed_memory as keep_freed_memory
from npattn.nn.mlp import MLP as MLP
from npattn.nn.mlp import GatedMLP as GatedMLP
from npattn.nn.norm import LayerNorm as LayerNorm
from npattn.nn.norm import RMSNorm as RMSNorm
from npattn.nn.position import ALiBi as ALiBi
from npattn.nn.position import LearnedPosition as LearnedPosition
from npattn.nn.position import Rotary as Rotary
from npattn.nn.position import SinusoidalPosition as SinusoidalPosition
from npattn.nn.sequential import Sequential as Sequential
from npattn.nn.transformer import TransformerDecoder as TransformerDecoder
from npattn.nn.transformer import TransformerEncoder as TransformerEncoder

"""Attention on graphs: adjacencies from networkx, scipy or arrays, graph attention layers, encodings."""

from npattn.functional.graph_attention import GraphAttentionGrads as GraphAttentionGrads
from npattn.functional.graph_attention import edge_softmax as edge_softmax
from npattn.functional.graph_attention import edge_softmax_vjp as edge_softmax_vjp
from npattn.functional.graph_attention import graph_attention as graph_attention
from npattn.functional.graph_attention import graph_attention_vjp as graph_attention_vjp
from npattn.graph.adjacency import Adjacency as Adjacency
from npattn.graph.encodings import ShortestPathBias as ShortestPathBias
from npattn.graph.encodings import degree_encoding as degree_encoding
from npattn.graph.encodings import laplacian_encoding as laplacian_encoding
from npattn.graph.encodings import random_walk_encoding as random_walk_encoding
from npattn.graph.encodings import shortest_path_distances as shortest_path_distances
from npattn.graph.gat_conv import GATConv as GATConv
from npattn.graph.gatv2_conv import GATv2Conv as GATv2Conv
from npattn.graph.transformer_block import GraphTransformerBlock as GraphTransformerBlock
from npattn.graph.transformer_conv import TransformerConv as TransformerConv

__all__ = [
    "Adjacency",
    "GATConv",
    "GATv2Conv",
    "GraphAttentionGrads",
    "GraphTransformerBlock",
    "ShortestPathBias",
    "TransformerConv",
    "degree_encoding",
    "edge_softmax",
    "edge_softmax_vjp",
    "graph_attention",
    "graph_attention_vjp",
    "laplacian_encoding",
    "random_walk_encoding",
    "shortest_path_distances",
]

"""Pure functions over arrays, ``f`` and ``f_vjp`` side by side.

Some modules bear the name of their function (``attention``, ``rotary``); the attribute is the function.
"""

from npattn.functional.activation import gelu as gelu
from npattn.functional.activation import gelu_vjp as gelu_vjp
from npattn.functional.activation import silu as silu
from npattn.functional.activation import silu_vjp as silu_vjp
from npattn.functional.activation import swiglu as swiglu
from npattn.functional.activation import swiglu_vjp as swiglu_vjp
from npattn.functional.attention import attention as attention
from npattn.functional.attention import attention_vjp as attention_vjp
from npattn.functional.attention import scaled_dot_product_attention as scaled_dot_product_attention
from npattn.functional.dropout import fold_seed as fold_seed
from npattn.functional.dropout import keep_mask as keep_mask
from npattn.functional.embedding import embedding as embedding
from npattn.functional.embedding import embedding_vjp as embedding_vjp
from npattn.functional.graph_attention import GraphAttentionGrads as GraphAttentionGrads
from npattn.functional.graph_attention import edge_softmax as edge_softmax
from npattn.functional.graph_attention import edge_softmax_vjp as edge_softmax_vjp
from npattn.functional.graph_attention import graph_attention as graph_attention
from npattn.functional.graph_attention import graph_attention_vjp as graph_attention_vjp
from npattn.functional.linear import linear as linear
from npattn.functional.linear import linear_vjp as linear_vjp
from npattn.functional.linear_attention import LinearAttentionGrads as LinearAttentionGrads
from npattn.functional.linear_attention import LinearAttentionState as LinearAttentionState
from npattn.functional.linear_attention import linear_attention as linear_attention
from npattn.functional.linear_attention import linear_attention_step as linear_attention_step
from npattn.functional.linear_attention import linear_attention_vjp as linear_attention_vjp
from npattn.functional.loss import cross_entropy as cross_entropy
from npattn.functional.loss import cross_entropy_vjp as cross_entropy_vjp
from npattn.functional.merge import merge_attention as merge_attention
from npattn.functional.merge import merge_attention_vjp as merge_attention_vjp
from npattn.functional.mlp import mlp as mlp
from npattn.functional.mlp import mlp_vjp as mlp_vjp
from npattn.functional.norm import layer_norm as layer_norm
from npattn.functional.norm import layer_norm_vjp as layer_norm_vjp
from npattn.functional.norm import rms_norm as rms_norm
from npattn.functional.norm import rms_norm_vjp as rms_norm_vjp
from npattn.functional.rotary import rotary as rotary
from npattn.functional.rotary import rotary_vjp as rotary_vjp
from npattn.functional.softmax import log_softmax as log_softmax
from npattn.functional.softmax import log_softmax_vjp as log_softmax_vjp
from npattn.functional.softmax import softmax as softmax
from npattn.functional.softmax import softmax_vjp as softmax_vjp
from npattn.functional.statistics import AttentionStats as AttentionStats
from npattn.functional.statistics import attention_stats as attention_stats
from npattn.functional.varlen import varlen_attention as varlen_attention
from npattn.functional.varlen import varlen_attention_vjp as varlen_attention_vjp
from npattn.functional.weights import attention_weights as attention_weights
from npattn.kernels.contract import AttentionGrads as AttentionGrads

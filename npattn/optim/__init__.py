"""Optimisers, gradient clipping and learning rates. Parameters are named arrays, updated in place."""

from npattn.optim.adam import Adam as Adam
from npattn.optim.adam import AdamW as AdamW
from npattn.optim.clip import clip_by_global_norm as clip_by_global_norm
from npattn.optim.schedule import warmup_cosine as warmup_cosine
from npattn.optim.sgd import SGD as SGD

"""Keys and values kept between calls, so that each token is projected once.

Every cache here is a *layer cache*: ``append`` the new keys and values, then ask ``attention`` for the
queries of the newest tokens. Which rows a query may see is a mask over what is stored; nothing is gathered
for it.

=================  ===================================================================================
`KVCache`          keeps every token up to a capacity; grows by doubling
`RollingKVCache`   keeps the first ``sinks`` and the last ``window`` tokens in a ring
`PagedKVCache`     many sequences in one pool of pages; shared prefixes are stored once
`LayerCaches`      the caches of all layers of a model, moved forward together or not at all
=================  ===================================================================================
"""

from npattn.cache._checks import CacheFullError as CacheFullError
from npattn.cache.kv import KVCache as KVCache
from npattn.cache.layers import LayerCache as LayerCache
from npattn.cache.layers import LayerCaches as LayerCaches
from npattn.cache.paged import PagedBatch as PagedBatch
from npattn.cache.paged import PagedKVCache as PagedKVCache
from npattn.cache.rolling import RollingKVCache as RollingKVCache

__all__ = [
    "CacheFullError",
    "KVCache",
    "LayerCache",
    "LayerCaches",
    "PagedBatch",
    "PagedKVCache",
    "RollingKVCache",
]

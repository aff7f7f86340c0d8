"""How long the tests wait: in one place, because how fast a machine is at the moment proves nothing.

A promise such as "within seconds" is held against ``SOON``, which is several times what a loaded machine needs and yet
a fraction of the minutes that a hang would take. What is to end or to come by itself has until ``LIMIT``, which only a
hang reaches. What has been ended may take ``GONE`` to disappear.
"""

from __future__ import annotations

SOON = 25.0
LIMIT = 240.0
GONE = 15.0

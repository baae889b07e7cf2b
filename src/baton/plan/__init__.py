"""Who sends what to whom: kinds, layouts, boxes, routes and the steps that move them. Pure, numpy only."""

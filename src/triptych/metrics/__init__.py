"""One table of names, the Prometheus registry made from it, one cost record a request, and its spans."""

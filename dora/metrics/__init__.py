"""The form of metrics, which services and fronts share: declarations, histograms and the text for Prometheus."""

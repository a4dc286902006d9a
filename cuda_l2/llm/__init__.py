"""Language models: how to ask one, over HTTP or in this process, within a budget, every exchange kept."""

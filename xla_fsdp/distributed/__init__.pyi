from .gather import all_gather as all_gather

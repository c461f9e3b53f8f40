"""Studies of three papers, on the core. The core never imports one; `tlspectral study` mounts their commands."""

from tlspectral.errors import require_package

require_package("matplotlib", "A study", '"tlspectral[papers]"')
require_package("statsmodels", "A study", '"tlspectral[papers]"')

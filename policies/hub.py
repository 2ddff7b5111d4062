"""The policy's network with huggingface_hub's mixin, for those who want to push a policy or fetch one.

It needs huggingface_hub (and its model cards jinja2), which autoprec does not bring along. Nothing else imports this.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from huggingface_hub import PyTorchModelHubMixin, hf_hub_download

from autoprec.policies.network import PolicyNetwork
from autoprec.policies.policy_file import CARD_FILE, WEIGHTS_FILE, card_for, load_policy, save_policy

_DOWNLOAD_OPTIONS = ("revision", "cache_dir", "force_download", "local_files_only", "token")


class HubPolicyNetwork(  # type: ignore[misc]  # the mixin's names come first on purpose
    PyTorchModelHubMixin,
    PolicyNetwork,
    library_name="autoprec",
    tags=["reinforcement-learning", "mixed-precision"],
):
    """A ``PolicyNetwork`` with ``push_to_hub``, and ``from_pretrained`` that also takes the name of a repository.

    What is written are the two files of every policy; they are checked when they are read, wherever they come from.

    Example:
        >>> network = HubPolicyNetwork.from_pretrained("policies/pretrained")  # doctest: +SKIP
        >>> network.push_to_hub("user/policy")  # doctest: +SKIP
    """

    def _save_pretrained(self, save_directory: Path) -> None:
        save_policy(save_directory, self, card_for(self))

    @classmethod
    def _from_pretrained(cls, *, model_id: str, **options: Any) -> HubPolicyNetwork:
        if Path(model_id).is_dir():
            return cls._of(load_policy(model_id)[0])
        chosen = {key: options[key] for key in _DOWNLOAD_OPTIONS if key in options}
        with tempfile.TemporaryDirectory() as folder:  # the hub's cache holds links, which are not read
            for name in (CARD_FILE, WEIGHTS_FILE):
                shutil.copyfile(hf_hub_download(model_id, name, **chosen), Path(folder, name))
            return cls._of(load_policy(folder)[0])

    @classmethod
    def _of(cls, network: PolicyNetwork) -> HubPolicyNetwork:
        made = cls(network.features, network.hidden)
        made.load_state_dict(network.state_dict())
        made.card = network.card
        return made.eval()

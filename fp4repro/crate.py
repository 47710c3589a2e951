"""A published folder described as an RO-Crate 1.1 (https://w3id.org/ro/crate/1.1), which archives read.

`rocrate`, of the extra `publish`, writes it; without that package the description says so in one field and
the folder is whole all the same. Dates come from the folder, so that the same folder gives the same text.
"""

import mimetypes
from importlib.util import find_spec
from pathlib import Path

LICENSE = "https://spdx.org/licenses/Apache-2.0"
PAPERS = {
    "https://arxiv.org/abs/2509.25149": "Pretraining Large Language Models with NVFP4",
    "https://arxiv.org/abs/2607.04422": (
        "Full-Stack FP4: Stable LLM Pretraining with Quantized Projections, Optimizers, and Attention"
    ),
}
WHAT = {
    "tables": "table of results",
    "figures": "figure",
    "raw": "measurement as it was taken",
    "configs": "configuration",
}


def crate_metadata(folder: Path, scale: str, date: str) -> dict:
    """The JSON-LD of a folder; `date` is that of its publication, YYYY-MM-DD."""
    if find_spec("rocrate") is None:
        return {"note": "not written: the package rocrate (extra publish) was not installed"}
    from rocrate.model.contextentity import ContextEntity
    from rocrate.rocrate import ROCrate

    crate = ROCrate()
    crate.name = f"fp4repro: results of scale {scale}"
    crate.description = "Tables, figures, raw rows and configuration; python -m fp4repro.verify checks them."
    crate.license = LICENSE
    crate.datePublished = date
    papers = [
        crate.add(ContextEntity(crate, url, {"@type": "ScholarlyArticle", "name": name}))
        for url, name in PAPERS.items()
    ]
    crate.root_dataset["citation"] = papers
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        kind, _ = mimetypes.guess_type(name)
        properties = {
            "name": name,
            "description": WHAT.get(name.partition("/")[0], "rows, settings or report"),
            "contentSize": str(path.stat().st_size),
            "encodingFormat": kind or "text/plain",
        }
        crate.add_file(path, name, properties=properties)
    return crate.metadata.generate()

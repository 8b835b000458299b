"""Handler for who sees whom: the attention of each layer, its measured matrix, and what one position sees."""

from __future__ import annotations

from typing import Any

from headwater.errors import BadInput
from headwater.i18n import _
from headwater.inspection.visibility import Edge, layer_attentions, measure_edges, measure_row
from headwater.serving.model_store import OpenModel
from headwater.serving.schemas import VisibilityRequest

MAX_MATRIX_LENGTH = 128  # a longer text has the row of one position only


def visibility(open_model: OpenModel, request: VisibilityRequest) -> dict[str, Any]:
    """The edges as digits of Edge: of one position, and the rows of the matrix of a text that is not too long."""
    layers = layer_attentions(open_model.inspected.model)
    if request.layer >= len(layers):
        raise BadInput(
            _("layer must be below {count}, got {layer}; choose another", count=len(layers), layer=request.layer)
        )
    layer = layers[request.layer]
    position = request.length // 2 if request.position is None else min(request.position, request.length - 1)
    if request.length <= MAX_MATRIX_LENGTH:
        matrix = measure_edges(layer, request.length)
        row = matrix[position]
    else:
        matrix = None
        row = measure_row(layer, request.length, position)
    return {
        "layers": [{"path": each.path, "name": each.name} for each in layers],
        "layer": request.layer,
        "length": request.length,
        "position": position,
        "edges": [edge.name.lower() for edge in Edge],
        "row": "".join(map(str, row)),
        "matrix": None if matrix is None else ["".join(map(str, line)) for line in matrix],
    }

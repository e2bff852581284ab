// Marks a cell that goes to the ranks: an edge in their colours, and their names where only some are meant.
import { Decoration, EditorView } from "@codemirror/view";
import type { EditorState, Extension } from "@codemirror/state";
import { distributedCell, MOST_CHARACTERS, namedRanks } from "./distributed_cell";
import type { DistributedCell } from "./distributed_cell";
import { edgeOf } from "./palette";

const magicLine = Decoration.line({ class: "nbgpu-magic" });

function found(state: EditorState): DistributedCell | null {
  return distributedCell(state.sliceDoc(0, MOST_CHARACTERS));
}

export function cellMark(): Extension {
  return [
    EditorView.editorAttributes.compute(["doc"], (state) => {
      const cell = found(state);
      if (!cell) return {};
      const some = cell.ranks?.length ? cell.ranks : null;
      const attributes: Record<string, string> = { class: "nbgpu-distributed" };
      if (some) {
        attributes["style"] = `--nbgpu-edge: ${edgeOf(some)}`;
        attributes["data-nbgpu-ranks"] = namedRanks(some);
      }
      return attributes;
    }),
    // The grammar of Python takes the magic's line for a broken expression.
    EditorView.decorations.compute(["doc"], (state) => {
      const cell = found(state);
      return cell ? Decoration.set([magicLine.range(state.doc.lineAt(cell.begin).from)]) : Decoration.none;
    }),
  ];
}

// Says that a widget is ready, until the kernel answers.
//
// While a cell is running, JupyterLab has a widget's messages answered on a subshell of the kernel. It asks for that
// subshell when the first widget opens, and what is sent before it is there waits for the main thread, which may be in
// the cell for hours.

const FIRST_PAUSE_MS = 250;

/** Each kernel that can answer has done so by then. One that cannot would answer them all after the cell. */
const MOST_REPEATS = 6;

/** Calls `say` now and again, with longer and longer pauses, until what is returned is called. */
export function sayUntilAnswered(say: () => void): () => void {
  let timer: ReturnType<typeof setTimeout>;
  const repeat = (repeatsLeft: number, pauseMs: number): void => {
    say();
    if (repeatsLeft > 0) timer = setTimeout(() => repeat(repeatsLeft - 1, 2 * pauseMs), pauseMs);
  };
  repeat(MOST_REPEATS, FIRST_PAUSE_MS);
  return () => clearTimeout(timer);
}

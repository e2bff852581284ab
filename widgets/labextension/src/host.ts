// Asks nbgpu's extension of the Jupyter server.
import { URLExt } from "@jupyterlab/coreutils";
import { ServerConnection } from "@jupyterlab/services";
import type { Cluster, Overview } from "./overview";

export class Host {
  constructor(private readonly settings: ServerConnection.ISettings) {}

  async overview(withDevices: boolean): Promise<Overview> {
    return (await this.ask(`overview?devices=${withDevices ? 1 : 0}`)) as Overview;
  }

  /** Asks the run of a cluster to pause, to go on or to stop. */
  async commandRun(cluster: Cluster, command: "pause" | "resume" | "stop"): Promise<void> {
    await this.ask(`clusters/${cluster.id}/run`, { run: cluster.run?.name ?? "", command });
  }

  async end(cluster: Cluster): Promise<void> {
    await this.ask(`clusters/${cluster.id}/end`, { state: cluster.state });
  }

  reportUrl(cluster: Cluster): string {
    const run = encodeURIComponent(cluster.run?.name ?? "");
    return URLExt.join(this.settings.baseUrl, "nbgpu", `clusters/${cluster.id}/report/${run}`);
  }

  private async ask(path: string, body?: object): Promise<unknown> {
    const url = URLExt.join(this.settings.baseUrl, "nbgpu", path);
    const request = body ? { method: "POST", body: JSON.stringify(body) } : { method: "GET" };
    let answer: Response;
    try {
      answer = await ServerConnection.makeRequest(url, request, this.settings);
    } catch {
      throw new Error("The Jupyter server does not answer.");
    }
    if (answer.status === 404 && !body) {
      throw new Error(
        "This Jupyter server does not have nbgpu's extension: install nbgpu where the server runs, and restart it.",
      );
    }
    const said = (await answer.json().catch(() => ({}))) as { message?: string };
    if (!answer.ok) throw new Error(said.message || `The Jupyter server answered ${answer.status}.`);
    return said;
  }
}

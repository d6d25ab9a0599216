// A page that was opened as a file may not start a Worker. The search is one: here it runs in a hidden frame instead.
// (What the generator would fetch for this from a server that is not ours.)
if (location.protocol === "file:") {
  // As with a Worker: a copy arrives, and never while the sender is still running.
  const later = (data, take) => {
    const copy = structuredClone(data);
    setTimeout(() => take(new MessageEvent("message", { data: copy })));
  };
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.title = "search";
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.postMessage = data => later(data, message => {
        this.dispatchEvent(message);
        if (this.onmessage) this.onmessage(message);
      });
      const script = inside.document.createElement("script");
      script.src = address;
      script.onload = () => {
        const waiting = this.waiting;
        this.waiting = null;
        waiting.forEach(data => this.postMessage(data));
      };
      inside.document.body.append(script);
    }
    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else later(data, message => this.frame.contentWindow?.dispatchEvent(message));
    }
    terminate() { this.frame.remove(); }
  };
}

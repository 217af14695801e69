// Search for a site that is opened as files: browsers start no worker from a folder, so its script runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      // What the script says to its parent comes out of this object.
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = frame.contentDocument.createElement("script");
      script.src = new URL(url, location.href).href;
      script.onload = () => {
        for (const data of this.waiting.splice(0)) this.tell(data);
        this.ready = true;
      };
      frame.contentDocument.body.append(script);
    }

    postMessage(data) {
      if (this.ready) this.tell(data);
      else this.waiting.push(data);
    }

    tell(data) {
      this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data }));
    }

    terminate() {
      this.inside.frameElement.remove();
    }
  };
}

// The search runs in a web worker, which browsers refuse to pages that are opened from disk. A hidden frame does its work.
if (location.protocol === "file:") {
  const load = (url) =>
    new Promise((done) => {
      const script = document.createElement("script")
      script.src = url
      script.onload = done
      document.body.append(script)
    })
  const loadAll = (...urls) => urls.reduce((before, url) => before.then(() => load(url)), Promise.resolve())

  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inside = this.frame.contentWindow
      addEventListener("message", (event) => {
        if (event.source !== inside) return
        const message = new MessageEvent("message", { data: event.data })
        this.dispatchEvent(message)
        if (this.onmessage) this.onmessage(message)
      })
      inside.document.open()
      inside.document.write(
        `<body><script>postMessage = (data) => parent.postMessage(data, "*"); load = ${load}; importScripts = ${loadAll}</script>` +
          `<script src="${url}"></script></body>`,
      )
      inside.document.close()
      this.ready = new Promise((done) => (inside.onload = done))
    }

    postMessage(data) {
      this.ready.then(() => {
        this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) }))
      })
    }

    terminate() {
      this.frame.remove()
    }
  }
}

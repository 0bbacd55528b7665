// Gets each URL with the HTTP clients of Node, as they come, and prints how each exchange ended.
import diagnostics from 'node:diagnostics_channel'
import https from 'node:https'
import http from 'node:http'
import axios from 'axios'
import {EnvHttpProxyAgent, ProxyAgent, request} from 'undici'

const h2 = new Set() // hosts to which a fetch speaks HTTP/2
diagnostics.channel('undici:client:connected').subscribe(m => m.socket.alpnProtocol === 'h2' && h2.add(m.connectParams.servername ?? m.connectParams.hostname))

const clients = {
  fetch: async url => { const r = await fetch(url); return [r.status, await r.text()] },
  module: url => new Promise((done, failed) => {
    (url.startsWith('https:') ? https : http).get(url, r => { let s = ''; r.setEncoding('utf8').on('data', d => s += d).on('end', () => done([r.statusCode, s])) }).on('error', failed)
  }),
  axios: async url => { const r = await axios.get(url); return [r.status, r.data] },
  env: async url => { const r = await request(url, {dispatcher: new EnvHttpProxyAgent()}); return [r.statusCode, await r.body.text()] },
  agent: async url => { const r = await request(url, {dispatcher: new ProxyAgent(process.env.HTTPS_PROXY)}); return [r.statusCode, await r.body.text()] },
}
for (const url of process.argv.slice(2)) {
  for (const [name, get] of Object.entries(clients)) {
    h2.clear()
    const [status, body] = await get(url + '/' + name)
    console.log(new URL(url).pathname + '/' + name, h2.size ? 'h2' : 'http/1.1', status, body)
  }
}
process.exit(0)

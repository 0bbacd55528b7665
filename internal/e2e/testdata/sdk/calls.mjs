// One call with a client library's default retries for each base path of argv:
//
//	node calls.mjs LIBRARY HOST PATIENCE_MS BASE…
//
// It prints a line of JSON on how each call ended. Node and most libraries follow
// HTTPS_PROXY (NODE_USE_ENV_PROXY) and NODE_EXTRA_CA_CERTS by themselves; those that
// have agents of their own are given one.
import {HttpsProxyAgent} from 'https-proxy-agent'
import {readFileSync} from 'node:fs'

const [library, host, patience, ...bases] = process.argv.slice(2)
const proxy = process.env.HTTPS_PROXY, ca = readFileSync(process.env.NODE_EXTRA_CA_CERTS)
const agent = new HttpsProxyAgent(proxy, {ca})

async function aws(name, Client, Command, base, input) {
  const sdk = await import('@aws-sdk/client-' + name)
  const {NodeHttpHandler} = await import('@smithy/node-http-handler')
  const c = new sdk[Client]({region: 'us-east-1', endpoint: 'https://' + host + base, forcePathStyle: true, credentials: {accessKeyId: 'AKIADUMMY', secretAccessKey: 'dummy'},
    requestHandler: new NodeHttpHandler({httpsAgent: agent})})
  return c.send(new sdk[Command](input))
}

const calls = {
  async openai(base) {
    const {default: OpenAI} = await import('openai')
    return new OpenAI({apiKey: 'dummy', baseURL: 'https://' + host + base}).chat.completions.create({model: 'm', messages: []})
  },
  async vercel(base) {
    const {generateText} = await import('ai')
    const {createOpenAI} = await import('@ai-sdk/openai')
    return generateText({model: createOpenAI({apiKey: 'dummy', baseURL: 'https://' + host + base})('m'), prompt: 'x'})
  },
  async anthropic(base) {
    const {default: Anthropic} = await import('@anthropic-ai/sdk')
    return new Anthropic({apiKey: 'dummy', baseURL: 'https://' + host + base}).messages.create({model: 'm', max_tokens: 1, messages: [{role: 'user', content: 'x'}]})
  },
  async google(base) {
    const {GoogleGenAI} = await import('@google/genai')
    return new GoogleGenAI({apiKey: 'dummy', httpOptions: {baseUrl: 'https://' + host + base}}).models.generateContent({model: 'm', contents: 'x'})
  },
  async stripe(base) {
    const {default: Stripe} = await import('stripe')
    // It has no base path: its own one is routed like the others.
    const c = new Stripe('sk_test_dummy', {host, protocol: 'https', httpAgent: agent, httpClient: Stripe.createNodeHttpClient(agent)})
    return c.rawRequest('POST', base + '/v1/charges', {amount: 5})
  },
  async octokit(base) {
    const {Octokit} = await import('octokit') // with its plugins, that for retries among them
    return new Octokit({auth: 'dummy', baseUrl: 'https://' + host + base}).rest.issues.create({owner: 'o', repo: 'r', title: 't'})
  },
  async slack(base) {
    const {WebClient} = await import('@slack/web-api')
    return new WebClient('xoxb-dummy', {slackApiUrl: 'https://' + host + base + '/api/'}).chat.postMessage({channel: 'C', text: 'x'})
  },
  async discord(base) {
    const {REST} = await import('@discordjs/rest')
    return new REST({api: 'https://' + host + base}).setToken('dummy').post('/channels/1/messages', {body: {content: 'x'}})
  },
  async graphql(base) {
    const {request} = await import('graphql-request')
    return request('https://' + host + base, 'mutation { issueCreate(title: "t") { id } }')
  },
  async notion(base) {
    const {Client} = await import('@notionhq/client')
    return new Client({auth: 'dummy', baseUrl: 'https://' + host + base}).pages.create({parent: {page_id: 'p'}, properties: {}})
  },
  async huggingface(base) {
    const {InferenceClient} = await import('@huggingface/inference')
    return new InferenceClient('hf_dummy', {endpointUrl: 'https://' + host + base}).chatCompletion({model: 'm', messages: [{role: 'user', content: 'x'}]})
  },
  async square(base) {
    const {SquareClient} = await import('square')
    return new SquareClient({token: 'dummy', baseUrl: 'https://' + host + base}).payments.create({sourceId: 's', idempotencyKey: 'k-' + base})
  },
  async kubernetes(base) {
    const k8s = await import('@kubernetes/client-node')
    const kc = new k8s.KubeConfig()
    kc.loadFromClusterAndUser({name: 'c', server: 'https://' + host + base, caData: ca.toString('base64'), proxyUrl: proxy}, {name: 'u', token: 'dummy'})
    return kc.makeApiClient(k8s.CoreV1Api).createNamespacedConfigMap({namespace: 'n', body: {metadata: {generateName: 'x-'}}})
  },
  dynamodb: base => aws('dynamodb', 'DynamoDBClient', 'PutItemCommand', base, {TableName: 't', Item: {id: {S: '1'}}}),
  sts: base => aws('sts', 'STSClient', 'GetSessionTokenCommand', base, {}),
  ec2: base => aws('ec2', 'EC2Client', 'RunInstancesCommand', base, {MinCount: 1, MaxCount: 1}),
  s3: base => aws('s3', 'S3Client', 'PutObjectCommand', base, {Bucket: 'b', Key: 'k', Body: 'x'}),
  lambda: base => aws('lambda', 'LambdaClient', 'InvokeCommand', base, {FunctionName: 'f', Payload: '{}'}),
  async openaistream(base) {
    const {default: OpenAI} = await import('openai')
    for await (const _ of await new OpenAI({apiKey: 'dummy', baseURL: 'https://' + host + base}).chat.completions.create({model: 'm', messages: [], stream: true}));
  },
  async vercelstream(base) {
    const {streamText} = await import('ai')
    const {createOpenAI} = await import('@ai-sdk/openai')
    const r = streamText({model: createOpenAI({apiKey: 'dummy', baseURL: 'https://' + host + base}).chat('m'), prompt: 'x', onError() {}})
    for await (const part of r.fullStream) if (part.type === 'error') throw part.error
  },
  async anthropicstream(base) {
    const {default: Anthropic} = await import('@anthropic-ai/sdk')
    for await (const _ of await new Anthropic({apiKey: 'dummy', baseURL: 'https://' + host + base}).messages.create({model: 'm', max_tokens: 1, messages: [{role: 'user', content: 'x'}], stream: true}));
  },
  async googlestream(base) {
    const {GoogleGenAI} = await import('@google/genai')
    for await (const _ of await new GoogleGenAI({apiKey: 'dummy', httpOptions: {baseUrl: 'https://' + host + base}}).models.generateContentStream({model: 'm', contents: 'x'}));
  },
  async axios(base) {
    const {default: axios} = await import('axios')
    return axios.post('https://' + host + base, {x: 1}, {httpsAgent: agent, proxy: false})
  },
}

// What a library shows of an error: its text, and what it hangs onto it.
function shown(e) {
  const seen = new Set()
  const all = e => {
    if (typeof e === 'string') return [e]
    if (e === null || typeof e !== 'object' || seen.has(e) || seen.size > 200) return []
    seen.add(e)
    return [e.message ?? '', ...['body', 'data', 'error', 'errors', 'raw', 'rawError', 'response', 'cause', 'lastError', 'responseBody', 'response_metadata', 'messages', 'httpResponse'].flatMap(k => all(e[k])), ...(Array.isArray(e) ? e.flatMap(all) : [])]
  }
  return all(e).filter(Boolean).join(' | ')
}

for (const base of bases) {
  const late = new Promise(done => setTimeout(done, Number(patience), {end: 'late', message: ''}))
  const end = await Promise.race([late, calls[library](base).then(() => ({end: 'done', message: ''}), e => ({end: 'failed', message: shown(e)}))])
  console.log(JSON.stringify({base, ...end}))
}
process.exit(0)
